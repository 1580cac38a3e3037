"""The form in which a target reads pictures: patches, tokens, and the token ids around them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydraspec.errors import CheckpointError, ConfigurationError
from hydraspec.models.checkpoint.config_reader import ConfigReader, text_part
from hydraspec.models.checkpoint.reader import Checkpoint
from hydraspec.models.gemma4.config import images_see_ahead
from hydraspec.models.gemma4.vision_config import DEFAULTS, KEY, read_vision
from hydraspec.pictures import MAX_SOFT_TOKENS

DEFAULT_MAX_TOKENS = 280
READ_BY = ("gemma4", "gemma4_unified")  # model types of wrappers whose encoders are understood
ID_DEFAULTS = {"boi_token_id": 255999, "image_token_id": 258880, "eoi_token_id": 258882}
# Files of a processor, each with the key that holds the image processor's part.
PROCESSOR_FILES = {"processor_config.json": "image_processor", "preprocessor_config.json": None}
BICUBIC = 3  # Pillow's number
# Keys of a processor's file whose other values are not understood.
PROCESSOR_KEYS: dict[str, tuple[object, ...]] = {
    "do_resize": (True,),
    "do_rescale": (True,),
    "do_normalize": (False,),
    "resample": (BICUBIC,),
    "rescale_factor": (1 / 255,),
}


@dataclass(slots=True, frozen=True, kw_only=True)
class PictureFormat:
    """The form in which a target reads pictures."""

    patch_size: int  # pixels of a patch's side
    pooling: int  # patches of a side that become one token
    max_tokens: int  # of a picture, in MAX_SOFT_TOKENS
    max_positions: int  # patches of a side: entries of the encoder's table
    begin_id: int  # token before the tokens of a picture
    image_id: int  # placeholder; one for each token of a picture
    end_id: int  # token after them
    may_be_cut: bool  # False: all tokens of a picture are read in one step


def read_picture_format(
    opened: Checkpoint, max_soft_tokens: int | None, *, has_encoder: bool = True
) -> PictureFormat | None:
    """The form of a checkpoint's pictures; None if it has no encoder for them that is understood,
    or the loaded target has none (`has_encoder`). `max_soft_tokens` (target.max_soft_tokens)
    overrides the checkpoint's number.

    Raises:
        CheckpointError: keys of config.json or of the processor's file are out of range.
        ConfigurationError: max_soft_tokens is set, and there is no encoder.
    """
    config, where = opened.config, str(opened.folder)
    is_read = has_encoder and config.get("model_type") in READ_BY
    shape = read_vision(config, where) if is_read else None
    if shape is None:
        if max_soft_tokens is None:
            return None
        raise ConfigurationError(
            f"target.max_soft_tokens={max_soft_tokens} has no meaning: the target reads no pictures"
            "\n  allowed: null\n  to do: leave the key out"
        )
    processor = _processor(opened.folder)
    vision = config[KEY]
    sides = {key: vision.get(key) or DEFAULTS[key] for key in ("patch_size", "pooling_kernel_size")}
    _check_processor(processor, sides, where)
    begin, image, end = _token_ids(config, where)
    return PictureFormat(
        patch_size=shape.patch_size,
        pooling=shape.pool,
        max_tokens=max_soft_tokens or _max_tokens(processor, config, where),
        max_positions=shape.num_positions,
        begin_id=begin,
        image_id=image,
        end_id=end,
        may_be_cut=not images_see_ahead(config),
    )


def _token_ids(config: Mapping[str, Any], where: str) -> list[int]:
    """The ids of ID_DEFAULTS, in its order."""
    reader = ConfigReader(config, where, ID_DEFAULTS)
    vocab_size = ConfigReader(text_part(config), where).count("vocab_size")
    found = [reader.count(key, least=0) for key in ID_DEFAULTS]
    for key, token in zip(ID_DEFAULTS, found, strict=True):
        if token >= vocab_size:
            raise reader.fail(key, f"an id of the vocabulary, below {vocab_size}")
    if len(set(found)) < len(found):
        raise reader.fail("image_token_id", "an id other than boi_token_id and eoi_token_id")
    return found


def _max_tokens(processor: Mapping[str, Any], config: Mapping[str, Any], where: str) -> int:
    for values, key in ((processor, "max_soft_tokens"), (config, "vision_soft_tokens_per_image")):
        reader = ConfigReader(values, where)
        if reader.get(key) is None:
            continue
        found = reader.count(key)
        if found not in MAX_SOFT_TOKENS:
            raise reader.fail(key, f"one of {', '.join(map(str, MAX_SOFT_TOKENS))}")
        return found
    return DEFAULT_MAX_TOKENS


def _processor(folder: Path) -> Mapping[str, Any]:
    """The image processor's keys in the first of PROCESSOR_FILES that has them; {} without any."""
    for name, part in PROCESSOR_FILES.items():
        file = folder / name
        if not file.is_file():
            continue
        try:
            content = json.loads(file.read_bytes())
            found = content.get(part) if part else content
            if isinstance(found, dict):
                return found
        except (OSError, ValueError, AttributeError, RecursionError) as error:
            raise CheckpointError(
                f"{name} of {str(folder)!r} cannot be read: {error}; download it again"
            ) from None
    return {}


def _check_processor(processor: Mapping[str, Any], patches: Mapping[str, int], where: str) -> None:
    """Refuse a processor that prepares pictures otherwise than `to_image` does."""
    known = PROCESSOR_KEYS | {key: (value,) for key, value in patches.items()}
    for key, allowed in known.items():
        found = processor.get(key)
        if found is not None and found not in allowed:
            raise CheckpointError(
                f"the image processor's file of {where!r}: {key} is {found!r}; expected "
                f"{allowed[0]!r}: only that preparation of pictures is understood"
            )
