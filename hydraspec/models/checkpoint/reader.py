"""Reads checkpoint folders: raw config.json, and tensors one at a time straight to where they are
used.

The module knows the Hugging Face folder layout and Mistral's, and nothing about any architecture.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from hydraspec.errors import CheckpointError
from hydraspec.models.checkpoint import mistral_names
from hydraspec.models.checkpoint.config_reader import number_that_is_not_finite, shown, text_part
from hydraspec.models.checkpoint.hub import download
from hydraspec.models.checkpoint.quantization_config import found_formats
from hydraspec.models.checkpoint.twins import TWINS, twin_folder
from hydraspec.shipped import SHAPE_PREFIX, SHAPES, ZOO, ZOO_PREFIX

PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
UNLISTED = "mask_embedding.safetensors"  # read too where an index does not list it: ADR 41
GGUF = ".gguf"  # llama.cpp's format
MAX_LISTED = 10  # names a message lists before it only counts


@dataclass(slots=True, frozen=True)
class TensorEntry:
    """A tensor of a safetensors file, unread. dtype is the format's own name, such as BF16."""

    file: Path
    name: str  # in the file
    shape: tuple[int, ...]
    dtype: str
    convert: Callable[[Tensor], Tensor] | None = None  # to Hugging Face's order of rows


@dataclass(slots=True)
class Checkpoint:
    """A readable folder: its config, its generation config ({} where absent) and its tensors."""

    folder: Path
    config: dict[str, Any]
    generation_config: dict[str, Any]
    _entries: dict[str, TensorEntry] | None = field(
        default=None, init=False, repr=False, compare=False
    )

    def entries(self) -> dict[str, TensorEntry]:
        """Every tensor by its Hugging Face name, read once from the files' headers.

        Raises CheckpointError: no safetensors, a shard missing, a file cut short or not
        safetensors.
        """
        if self._entries is None:
            found: dict[str, TensorEntry] = {}
            for file in _tensor_files(self.folder):
                found.update(_read_header(file))
            if mistral_names.is_consolidated(found):
                found = _from_consolidated(found, self.config)
            self._entries = found
        return self._entries

    @property
    def is_quantised(self) -> bool:
        """Returns whether the config names number formats of matrices. All weights may be float all
        the same, and the formats unknown: see `schemes_of` and `read_schemes`.
        """
        return found_formats(self.config, str(self.folder)) is not None

    def token_ids(self, key: str, vocab_size: int) -> tuple[int, ...]:
        """Ids under a key of generation_config.json, else of config.json; those outside the
        vocabulary are dropped.

        Raises CheckpointError for a value that is neither a whole number from 0 nor a list of them.
        """
        sources = {
            "generation_config.json": self.generation_config,
            "config.json": self.config,
            "config.json's text_config": text_part(self.config),
        }
        for name, source in sources.items():
            value = source.get(key)
            if value is None:
                continue
            ids = value if isinstance(value, list) else [value]
            if any(not isinstance(i, int) or isinstance(i, bool) or i < 0 for i in ids):
                raise CheckpointError(
                    f"{name} of {str(self.folder)!r}: {key} is {shown(value)}; expected a token "
                    "id or a list of them, whole numbers from 0: mend the file"
                )
            return tuple(i for i in ids if i < vocab_size)
        return ()


def resolve_folder(checkpoint: str) -> Path:
    """The folder of "zoo:<name>", "shape:<name>", a path, or a hub id (downloaded: safetensors,
    json and tokenizer files only).

    Raises CheckpointError with the remedy.
    """
    for prefix, place in ((ZOO_PREFIX, ZOO), (SHAPE_PREFIX, SHAPES)):
        if checkpoint.startswith(prefix):
            return _packaged_folder(prefix, place, checkpoint.removeprefix(prefix))
    folder = Path(checkpoint).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_file() and folder.suffix == GGUF:
        raise _is_gguf(folder)
    if folder.is_file():
        raise CheckpointError(
            f"checkpoint {checkpoint!r} is a file; expected a folder with config.json and "
            f"safetensors: give its folder, {str(folder.parent)!r}"
        )
    parts = checkpoint.split("/")
    looks_like_path = checkpoint.startswith((".", "/", "~", "\\")) or len(parts) != 2 or "" in parts
    if looks_like_path or folder.parent.is_dir():
        raise CheckpointError(
            f"checkpoint folder {checkpoint!r} does not exist; expected a folder with config.json "
            "and safetensors files, zoo:<name>, or a hub id <owner>/<name>: check the spelling"
        )
    return download(checkpoint)


def _packaged_folder(prefix: str, root: Path, name: str) -> Path:
    if any((root / name / config).is_file() for config in ("config.json", "params.json")):
        return root / name
    if prefix == ZOO_PREFIX and name in TWINS:
        return twin_folder(name)
    known = sorted(p.name for p in root.iterdir() if p.is_dir()) if root.is_dir() else []
    known += sorted(TWINS) if prefix == ZOO_PREFIX else []
    where = "in the zoo; it holds" if prefix == ZOO_PREFIX else "in the package; its shapes are"
    raise CheckpointError(
        f"checkpoint '{prefix}{name}' is not {where} {', '.join(known) or 'nothing yet'}"
    )


def open_checkpoint(checkpoint: str) -> Checkpoint:
    """Resolves the folder and reads its json files; tensors stay unread. Raises CheckpointError."""
    folder = resolve_folder(checkpoint)
    if (folder / "config.json").is_file():
        config = _read_config(folder / "config.json")
    elif (folder / "params.json").is_file():
        config = mistral_names.config_of_params(_read_config(folder / "params.json"), str(folder))
    else:
        _check_gguf(folder)
        raise CheckpointError(
            f"checkpoint folder {str(folder)!r} has no config.json; expected the folder that "
            "save_pretrained or a Hugging Face download wrote (or Mistral's, with params.json)"
        )
    generation = folder / "generation_config.json"
    return Checkpoint(folder, config, read_json(generation) if generation.is_file() else {})


def _read_config(file: Path) -> dict[str, Any]:
    """The object in a json file. Raises CheckpointError as `read_json`, and for NaN or infinity:
    json has neither, but Python reads both, and 1e400 as infinity."""
    config = read_json(file)
    found = number_that_is_not_finite(config)
    if found is not None:
        key, value = found
        raise CheckpointError(
            f"{file.name} of {str(file.parent)!r}: {key} is {value}; expected a finite number: "
            "mend the file or download it again"
        )
    return config


def read_json(file: Path) -> dict[str, Any]:
    """The object in a json file, with or without a byte order mark.

    Raises CheckpointError if the file cannot be read or holds something else.
    """
    try:
        value = json.loads(file.read_bytes().decode("utf-8-sig"))
    except OSError as error:
        raise cannot_read(file, error) from None
    except ValueError as error:
        raise CheckpointError(
            f"{str(file)!r} is not readable json ({error}): fetch it again"
        ) from None
    except RecursionError:
        raise CheckpointError(
            f"{str(file)!r} is nested too deeply to be read; expected a few levels: fetch it again"
        ) from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{str(file)!r} holds a {type(value).__name__}; expected an object")
    return value


def cannot_read(file: Path, error: OSError) -> CheckpointError:
    """The error for a file that exists and that the system does not let this user read."""
    reason = error.strerror or type(error).__name__
    return CheckpointError(
        f"{str(file)!r} cannot be read: {reason}; expected a file that this user may read: check "
        "its permissions and its disk"
    )


def _tensor_files(folder: Path) -> list[Path]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return sorted({*_indexed_files(index), *folder.glob(UNLISTED)})
    files = sorted(folder.glob("*.safetensors"))
    # Some releases hold the same weights twice, in Hugging Face's and in Mistral's own format.
    ours = [file for file in files if not file.name.startswith("consolidated")]
    if ours:
        return ours
    index = folder / "consolidated.safetensors.index.json"
    if index.is_file():
        return _indexed_files(index)
    if files:
        return files
    pickles = sorted(file.name for pattern in PICKLES for file in folder.glob(pattern))
    if pickles:
        raise CheckpointError(
            f"checkpoint {str(folder)!r} has only pickle files ({listed(pickles)}); expected "
            "safetensors, since loading a pickle runs code: convert it with save_pretrained"
        )
    _check_gguf(folder)
    raise CheckpointError(
        f"checkpoint {str(folder)!r} has no safetensors file; expected model.safetensors or shards "
        "with model.safetensors.index.json: download it again"
    )


def _check_gguf(folder: Path) -> None:
    """Raises CheckpointError if a folder without safetensors has files of llama.cpp's format."""
    for file in sorted(folder.glob(f"*{GGUF}")):
        raise _is_gguf(file)


def _is_gguf(file: Path) -> CheckpointError:
    return CheckpointError(
        f"checkpoint {str(file)!r} is in llama.cpp's format (GGUF); expected a folder with "
        "config.json and safetensors: give the release that it was converted from"
    )


def _indexed_files(index: Path) -> list[Path]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{str(index)!r} has no weight_map: fetch it again")
    for tensor, name in weight_map.items():
        if not _stays_inside(name):
            raise CheckpointError(
                f"{str(index)!r}: weight_map of {shown(tensor)} is {shown(name)}; expected the "
                "name of a safetensors file in its folder: fetch it again"
            )
    files = [index.parent / name for name in sorted(set(weight_map.values()))]
    absent = [shown(file.name).strip("'") for file in files if not _is_file(file)]
    if absent:
        raise CheckpointError(
            f"checkpoint {str(index.parent)!r} lacks {listed(absent)}, which its index lists "
            f"({len(files)} files): download it again"
        )
    return files


def _stays_inside(name: object) -> bool:
    """Returns whether a file's name, as written, stays inside its folder. Links in the folder are
    followed: the hub's own cache consists of them.
    """
    if not isinstance(name, str) or "\\" in name:
        return False
    path = PurePosixPath(name)
    return bool(path.parts) and not path.is_absolute() and ".." not in path.parts


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a name that is too long, or that no file can have
        return False


def _from_consolidated(
    entries: Mapping[str, TensorEntry], config: Mapping[str, Any]
) -> dict[str, TensorEntry]:
    """Entries by Hugging Face's names instead of Mistral's, wq and wk with `convert` set."""
    found = {}
    for name, entry in entries.items():
        heads = mistral_names.rotary_heads(name, text_part(config))
        convert = None if heads is None else partial(mistral_names.half_split, heads=heads)
        found[mistral_names.hugging_face_name(name)] = replace(entry, convert=convert)
    return found


def _read_header(file: Path) -> dict[str, TensorEntry]:
    try:
        with file.open("rb") as readable:
            readable.read(8)  # the library does not tell unreadable files from broken ones
    except OSError as error:
        raise cannot_read(file, error) from None
    try:
        with safe_open(file, framework="pt") as opened:
            entries = {}
            for name in opened.keys():  # noqa: SIM118 (not a dict)
                part = opened.get_slice(name)
                entries[name] = TensorEntry(file, name, tuple(part.get_shape()), part.get_dtype())
            return entries
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{str(file)!r} is cut short or not a safetensors file ({error}): download it again"
        ) from None


def listed(names: list[str]) -> str:
    """Text with the first MAX_LISTED names, and how many more there are."""
    more = len(names) - MAX_LISTED
    return ", ".join(names[:MAX_LISTED]) + (f" and {more} more" if more > 0 else "")
