"""Reads the config of a block drafter (DFlash, DSpark, DFlash2) as z-lab, speculators or
deepseek-ai write it. loading.py checks it against the tensors and the target.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from hydraspec_kernels.attention import RowMask

from hydraspec.models.aux_states import ids_of_layer_outputs
from hydraspec.models.checkpoint.config_reader import ConfigReader
from hydraspec.models.checkpoint.reader import Checkpoint
from hydraspec.models.detect import (
    DEEPSPEC,
    GEMMA_ARCHITECTURE,
    SPECULATORS,
    Detected,
    architectures_of,
    check_method,
    part_of,
)
from hydraspec.models.draft_families import FamilyName, plain_gemma_layers
from hydraspec.models.kv_groups import FULL, SLIDING

PART = "dflash_config"  # the object in which z-lab's files keep the drafter's own keys
MASK_EMBEDDING = "mask_embedding"  # the tensor that enters for mask tokens
MASK_PICKLE = f"{MASK_EMBEDDING}.pt"  # the same as some heads publish it: a dict, or the tensor
CONVERT = (
    'python -c "import torch; from safetensors.torch import save_file; '
    f"e = torch.load('{MASK_PICKLE}', weights_only=True); "
    f"save_file({{'{MASK_EMBEDDING}': (e['embedding'] if isinstance(e, dict) else e).flatten()}}, "
    f"'{MASK_EMBEDDING}.safetensors')\""
)
MARKOV_KINDS = ("vanilla", "gated", "rnn")
LEAST_BLOCK = 2  # rows: the newest token and a mask
UNCOMPUTED = {  # z-lab's keys for other attentions -> the only supported value
    f"{PART}.attention_sink_bias": False,
    f"{PART}.attention_value_scale": 1,
    "is_neox_style": True,
    "logit_scale": 1,
}


@dataclass(slots=True, frozen=True)
class Convolution:
    """DFlash2's convolutions around attention and MLP."""

    taps: int
    group: int  # columns that share a row's tap


@dataclass(slots=True, frozen=True, kw_only=True)
class BlockConfig:
    """A block drafter as its config describes it."""

    method: str  # dflash, dspark or dflash2
    format: str
    layers: dict[str, Any]  # its decoder layers, as a Hugging Face config
    family: FamilyName = "dense"  # of its layers
    aux_layer_ids: tuple[int, ...]  # states after so many layers of the target; 0: its embedding
    block_size: int  # rows of a block, the newest token's included
    mask_token_id: int
    samples_anchor: bool  # row i predicts the token after its own position, the anchor's too
    is_causal: bool = False  # rows of full layers do not see later rows of the block
    is_sliding_causal: bool = False  # the same of sliding layers
    scales_embedding: bool = False  # tokens enter as the target's first layer reads them
    draft_vocab_size: int | None = None
    target_hidden_size: int | None = None
    num_target_layers: int | None = None
    softcap: float | None = None
    markov_rank: int = 0  # 0: no Markov head
    markov_kind: str = "vanilla"
    has_confidence: bool = False
    confidence_reads_markov: bool = True
    embed_scale: float = 1.0  # factor of the embedding's rows, where the target's does not count
    output_multiplier: float = 1.0  # of the logits, before the soft cap
    convolution: Convolution | None = None
    selector_rank: int = 0  # 0: no candidate selector
    num_candidates: int = 0  # tokens of each row that the selector chooses from
    verifier: str | None = None
    notes: tuple[str, ...] = ()

    @property
    def most_drafts(self) -> int:
        """Largest K that the block has rows for."""
        return self.block_size if self.samples_anchor else self.block_size - 1

    def mask(self, kind: str) -> RowMask:
        """The attention mask of a kind of layers."""
        causal = self.is_sliding_causal if kind == SLIDING else self.is_causal
        return "causal_block" if causal else "block"


def read_block_drafter(opened: Checkpoint, method: str) -> BlockConfig:
    """The config of a folder that must hold a drafter for `method` (dflash, dspark or dflash2).

    Raises CheckpointError for a drafter of another method, keys that contradict each other, and
    missing keys that have no default.
    """
    found = check_method(opened, method)
    where = str(opened.folder)
    raw = opened.config
    nested = part_of(raw, PART, where)
    keys = ConfigReader(raw | {f"{PART}.{key}": nested[key] for key in nested}, where)
    for key, computed in UNCOMPUTED.items():
        if keys.get(key, computed) != computed:
            raise keys.fail(key, f"{computed} or nothing, since no other drafter is computed")
    read = {SPECULATORS: _read_speculators, DEEPSPEC: _read_deepspec}.get(found.format, _read_z_lab)
    config = replace(read(keys, found, opened), verifier=found.verifier)
    if config.method == "dspark":
        config = _with_heads(config, keys)
    if config.method == "dflash2":
        config = _with_selector(config, keys)
    return config


def _common(keys: ConfigReader, found: Detected) -> dict[str, Any]:
    """Fields that all formats spell alike."""
    size = "block_size" if keys.get("block_size") is not None else f"{PART}.block_size"
    softcap = keys.get("final_logit_softcapping", keys.get(f"{PART}.final_logit_softcapping"))
    return {
        "method": found.method,
        "format": found.format,
        "block_size": keys.count(size, least=LEAST_BLOCK),
        "draft_vocab_size": keys.optional_count("draft_vocab_size"),
        "softcap": None if softcap is None else keys.number("final_logit_softcapping", softcap),
    }


def _mask_token(keys: ConfigReader, *names: str) -> int:
    """The mask token under any of some keys. Raises CheckpointError if it is absent, or if they
    contradict each other."""
    found = [name for name in names if keys.get(name) is not None] or [names[0]]
    token = keys.count(found[0], least=0)
    for name in found[1:]:
        if keys.get(name) != token:
            raise keys.fail(name, f"the same as {found[0]}, {token}: mend the config")
    return token


def _layer_numbers(keys: ConfigReader, *names: str, least: int = 0) -> tuple[int, ...] | None:
    """Different layer numbers under any of some keys; None if all are absent."""
    name = next((name for name in names if keys.get(name) is not None), None)
    if name is None:
        return None
    value = keys.get(name)
    is_list = isinstance(value, list) and value and all(type(i) is int for i in value)
    if not is_list or len(set(value)) != len(value) or min(value) < least:
        raise keys.fail(name, f"different layer numbers from {least} on: mend the config")
    return tuple(value)


# ------------------------------------------------------------------ formats


def _read_speculators(keys: ConfigReader, found: Detected, opened: Checkpoint) -> BlockConfig:
    """speculators' configs of DFlash, DSpark and DFlash2; layers are counted as states after that
    many. Sliding layers are causal unless the config says otherwise, but DFlash2's, which are not
    unless it says so."""
    layers = keys.get("transformer_layer_config")
    if not isinstance(layers, dict):
        raise keys.fail(
            "transformer_layer_config", "the config of the drafter's layers: download it again"
        )
    ids = _layer_numbers(keys, "aux_hidden_state_layer_ids")
    if ids is None:
        raise keys.fail(
            "aux_hidden_state_layer_ids", "the target's layers that it reads: download it again"
        )
    from_anchor = keys.flag("sample_from_anchor")
    sees_all = keys.flag("sliding_window_non_causal")
    sees_all = found.method == "dflash2" if sees_all is None else sees_all
    return BlockConfig(
        **_common(keys, found),
        layers=_sliding(layers),
        aux_layer_ids=ids,
        mask_token_id=_mask_token(keys, "mask_token_id"),
        samples_anchor=found.method == "dspark" if from_anchor is None else from_anchor,
        is_sliding_causal=not sees_all,
        target_hidden_size=keys.optional_count("target_hidden_size"),
    )


def _read_z_lab(keys: ConfigReader, found: Detected, opened: Checkpoint) -> BlockConfig:
    """z-lab's DFlashDraftModel and DFlash2DraftModel: embedding and head are the target's modules,
    DFlash's with their scaling; sliding layers are causal, and full ones not, unless the config
    says what all are."""
    layers = dict(opened.config)
    if keys.get(f"{PART}.use_swa"):
        window = keys.count(f"{PART}.swa_window_size")
        kinds = [SLIDING] * keys.count("num_hidden_layers")
        layers |= {"sliding_window": window, "layer_types": kinds}
    depth = "num_target_layers"
    num_target_layers = keys.optional_count(depth)
    outputs = _layer_numbers(keys, f"{PART}.target_layer_ids", "target_layer_ids")
    if outputs is None:
        outputs = spread_layers(keys.count(depth), keys.count("num_hidden_layers"))
    causal = keys.flag(f"{PART}.causal", "is_causal")
    layers = _sliding(layers)
    notes: tuple[str, ...] = ()
    if causal is None and SLIDING in (layers.get("layer_types") or ()):
        notes = (
            f"drafter {keys.where!r} does not say is_causal; its sliding layers are taken to be "
            "causal and its full ones not, as its authors' code computes them",
        )
    return BlockConfig(
        **_common(keys, found),
        layers=layers,
        aux_layer_ids=ids_of_layer_outputs(outputs),
        mask_token_id=_mask_token(keys, f"{PART}.mask_token_id", "mask_token_id"),
        samples_anchor=bool(keys.flag(f"{PART}.sample_from_anchor")),
        is_causal=bool(causal),
        is_sliding_causal=causal is not False,
        scales_embedding=True,
        num_target_layers=num_target_layers,
        notes=notes,
    )


def _read_deepspec(keys: ConfigReader, found: Detected, opened: Checkpoint) -> BlockConfig:
    """deepseek-ai's Qwen3DSparkModel and Gemma4DSparkModel, without a Markov head too (their
    DFlash): every row predicts the next token, the anchor's included. Layer -1 is the target's
    embedding."""
    outputs = _layer_numbers(keys, "target_layer_ids", least=-1)
    if outputs is None:
        raise keys.fail("target_layer_ids", "the target's layers that it reads: download it again")
    is_gemma = architectures_of(opened.config) == GEMMA_ARCHITECTURE
    return BlockConfig(
        **_common(keys, found),
        layers=plain_gemma_layers(keys) if is_gemma else dict(opened.config),
        family="gemma4" if is_gemma else "dense",
        scales_embedding=is_gemma,
        aux_layer_ids=ids_of_layer_outputs(outputs),
        mask_token_id=_mask_token(keys, "mask_token_id"),
        samples_anchor=True,
        num_target_layers=keys.optional_count("num_target_layers"),
    )


def _with_heads(config: BlockConfig, keys: ConfigReader) -> BlockConfig:
    """The config with DSpark's Markov and confidence heads."""
    rank = keys.count("markov_rank", 256, least=0)
    kind = keys.get("markov_head_type", MARKOV_KINDS[0])
    if rank and kind not in MARKOV_KINDS:
        raise keys.fail("markov_head_type", f"one of {', '.join(MARKOV_KINDS)}")
    has_confidence = keys.flag("enable_confidence_head")
    reads_markov = keys.flag("confidence_head_with_markov")
    has_confidence = config.format == SPECULATORS if has_confidence is None else has_confidence
    reads_markov = reads_markov is not False
    if has_confidence and reads_markov and not rank:
        raise keys.fail("markov_rank", "above 0, since confidence_head_with_markov is true")
    return replace(
        config,
        markov_rank=rank,
        markov_kind=str(kind),
        has_confidence=has_confidence,
        confidence_reads_markov=reads_markov,
    )


def _with_selector(config: BlockConfig, keys: ConfigReader) -> BlockConfig:
    """The config with DFlash2's convolutions and candidate selector, whose keys z-lab nests. Tokens
    enter by the table's rows, times a factor that the file may state."""
    at = "" if config.format == SPECULATORS else f"{PART}."
    group, size = keys.count(f"{at}conv_group_size", 16), config.layers.get("hidden_size")
    if isinstance(size, int) and size % group:
        raise keys.fail(f"{at}conv_group_size", f"a divisor of hidden_size, {size}")
    taps = keys.count(f"{at}conv_kernel_size", 2)
    if taps > config.block_size:
        raise keys.fail(f"{at}conv_kernel_size", f"at most block_size, {config.block_size}")
    tokens = config.layers.get("vocab_size")
    if config.draft_vocab_size not in (None, tokens):
        raise keys.fail("draft_vocab_size", f"the vocabulary's size, {tokens}, or nothing")
    most = keys.count(f"{at}selector_top_k", 16)
    if isinstance(tokens, int) and most > tokens:
        raise keys.fail(f"{at}selector_top_k", f"at most the vocabulary's size, {tokens}")
    return replace(
        config,
        scales_embedding=False,
        embed_scale=keys.number(f"{PART}.input_embedding_scale", 1.0),
        output_multiplier=keys.number(f"{PART}.output_multiplier", 1.0),
        convolution=Convolution(taps, group),
        selector_rank=keys.count(f"{at}selector_rank", 256),
        num_candidates=most,
    )


def spread_layers(num_target_layers: int, count: int) -> tuple[int, ...]:
    """Layer outputs that z-lab's code reads where the config names none: spread evenly from the
    second to the last but two."""
    if count == 1:
        return (num_target_layers // 2,)
    step = (num_target_layers - 4) / (count - 1)
    return tuple(round(1 + i * step) for i in range(count))


def _sliding(layers: dict[str, Any]) -> dict[str, Any]:
    """A Hugging Face config of layers in which layer_types alone decides on windows."""
    kinds = layers.get("layer_types")
    if isinstance(kinds, list) and SLIDING in kinds:
        return {"max_window_layers": 0} | layers | {"use_sliding_window": True}
    if isinstance(kinds, list) and set(kinds) == {FULL}:
        return layers | {"use_sliding_window": False}
    return layers
