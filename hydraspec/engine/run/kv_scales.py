"""Scales of an FP8 KV cache: the checkpoint's, or those of one fixed prompt that the target reads
before anything else runs (docs/adr/0046)."""

from __future__ import annotations

from copy import copy

import torch
from hydraspec_kernels.quantised import E4M3_MAX
from hydraspec_kernels.runtime.ahead import can_compile_ahead, compiled_ahead
from torch import Tensor

from hydraspec.config.messages import refusal
from hydraspec.config.schema import RunConfig, Weights
from hydraspec.errors import ConfigurationError
from hydraspec.models.base import TargetModel
from hydraspec.models.checkpoint.kv_scales import other_kv_format, stored_kv_scales
from hydraspec.models.checkpoint.reader import open_checkpoint
from hydraspec.models.decoder import Decoder
from hydraspec.parallel.control import Control
from hydraspec.parallel.group import TensorGroup
from hydraspec.parallel.stages import StageLink
from hydraspec.types import IntermediateTensors, Rows, RowSegment

NUM_TOKENS = 256  # of the prompt
STRIDE = 7919  # from one token id of it to the next: a prime, so that ids spread over a vocabulary
BLOCK = 16
HEADROOM = 4.0  # e4m3's largest number over the prompt's largest magnitude, at least
LEAST_EXPONENT = -60


def scale_kv(
    target: TargetModel, config: RunConfig, link: StageLink | None, control: Control
) -> None:
    """Gives the target an e4m3 cache with a scale of keys and one of values for each layer and KV
    head. Every rank of a run calls this at the same time.

    Raises:
        ConfigurationError: the target's cache cannot be in e4m3, or its checkpoint names another
            format.
        CheckpointError: the checkpoint's scales cannot be used.
    """
    if not isinstance(target, Decoder) or any(
        spec.shape.latent_dim is not None for spec in target.kv_groups(BLOCK)
    ):
        raise _refused(config, "its cache does not hold the keys and values of heads")
    owners = [layer for spec in target.kv_groups(BLOCK) for layer in spec.layers]
    # Ranks and stages have the same files: all of them calibrate, or none.
    scales: dict[int, Tensor] = {}
    if config.target.weights is Weights.checkpoint:
        checkpoint = open_checkpoint(config.target.checkpoint)
        if other := other_kv_format(checkpoint):
            where = f"config.json of {str(checkpoint.folder)!r}"
            raise _refused(config, f"the kv_cache_scheme in {where} names no FP8 format ({other})")
        scales = stored_kv_scales(checkpoint, target)
    if not control.agree_all(all(layer in scales for layer in owners)):
        num_tokens = min(NUM_TOKENS, target.max_position_embeddings)
        scales = calibrated(target, num_tokens, link, control)
    keep_in_e4m3(target, scales)


def _refused(config: RunConfig, reason: str) -> ConfigurationError:
    return refusal(
        "engine.kv_cache.dtype",
        config.engine.kv_cache.dtype.value,
        f"is not available with target={config.target.name}: {reason}",
        allowed="auto",
        remedy="leave the key out, or choose another target",
    )


def keep_in_e4m3(target: Decoder, scales: dict[int, Tensor]) -> None:
    """From now on the target's caches are in e4m3, with these scales [2, Hkv] float32 of this
    rank's heads, by held layer that owns KV. Layers that share KV use their source's."""
    target.kv_scales = scales
    for i in target.held:
        target.layers[i].attention.use_kv_scales(scales[target.kv_source(i)])


def calibrated(
    target: Decoder, num_tokens: int, link: StageLink | None, control: Control
) -> dict[int, Tensor]:
    """Scales [2, Hkv] by layer from a fixed prompt, whose keys and values are kept in the target's
    type meanwhile: `power_of_two_scales` of their largest magnitudes."""
    target = copy(target)  # kv_groups sets this copy's block size
    specs = target.kv_groups(BLOCK)
    rows = _prompt(num_tokens, target, len(specs))
    num_rows = BLOCK * (1 + rows.block_tables[0].shape[1])
    caches: list[Tensor | None] = [None] * target.num_layers
    for spec in specs:
        for layer in spec.layers:
            shape = (num_rows, *spec.shape.page_row)
            caches[layer] = torch.zeros(shape, dtype=target.dtype, device=target.device)
    with torch.inference_mode():
        if can_compile_ahead(target.device):
            with compiled_ahead(target.device):
                _read(target, rows, caches, None)
            control.agree_all(True)  # later, devices wait for each other, with short limits
            rows = _prompt(num_tokens, target, len(specs))
        _read(target, rows, caches, link)
    found = {}
    for layer, cache in enumerate(caches):
        if cache is not None:
            top = cache[BLOCK:].abs().amax((0, 3)).to(torch.float32)
            heads = target.layers[layer].attention.kv
            top = _shared(top, heads.size, target.place.group)
            # On the host, where powers of two are exact.
            found[layer] = power_of_two_scales(top.cpu()).to(target.device)
    return found


def _prompt(num_tokens: int, target: Decoder, num_groups: int) -> Rows:
    device = target.device
    positions = torch.arange(num_tokens, device=device)
    table = torch.arange(1, 1 + -(-num_tokens // BLOCK), device=device)[None]
    return Rows(
        segments=(RowSegment(0, 0, 1, num_tokens, num_tokens),),
        input_ids=positions * STRIDE % target.vocab_size,
        positions=positions,
        seq_lens=torch.tensor([num_tokens], device=device),
        slot_mapping=[positions + BLOCK] * num_groups,
        block_tables=[table] * num_groups,
        query_start_loc=torch.tensor([0, num_tokens], device=device),
    )


def _read(target: Decoder, rows: Rows, caches: list[Tensor | None], link: StageLink | None) -> None:
    """Runs the layers of this pipeline stage; without a link, on zeros after the first stage."""
    received = None
    if not target.stage.is_first:
        stream = torch.zeros(
            1, len(rows.positions), target.hidden_size, dtype=target.dtype, device=target.device
        )
        if link is not None:
            link.receive(stream)
        received = IntermediateTensors(hidden_states=stream[0], aux_hidden_states=[])
    hidden, _ = target.forward(rows, caches, (), None, received)
    if link is not None and not target.stage.is_last:
        link.send(hidden[None])


def _shared(top: Tensor, num_heads: int, group: TensorGroup) -> Tensor:
    """Magnitudes [2, Hkv], the largest of all ranks that hold the same one of num_heads heads."""
    if group.size <= num_heads:
        return top
    holders = group.size // num_heads
    first = group.rank // holders * holders
    return group.all_gather(top)[first : first + holders].amax(0)


def power_of_two_scales(top: Tensor) -> Tensor:
    """The least powers of two by which numbers of magnitude `top` become 448 / HEADROOM or less; 1
    for magnitudes of zero, and for those that are not finite."""
    usable = top.isfinite() & (top > 0)
    fraction, exponent = torch.frexp(torch.where(usable, top * (HEADROOM / E4M3_MAX), 1.0))
    exponent = exponent - (fraction == 0.5).to(exponent.dtype)
    return torch.ldexp(torch.ones_like(top), exponent.clamp(min=LEAST_EXPONENT))
