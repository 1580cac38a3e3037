"""Random weights for vLLM that equal the native engine's, in place of its dummy weights.

With dummy weights (at most 0.001 everywhere, norms and layer scalars among them) the residual
stream of Gemma 4 becomes exact zeros in later layers, which a device at its power limit multiplies
in less time: vLLM prefills the 31B shape in 1.36 s with them and in 1.57 s with weights of a
model's size. vLLM's own loaders cut out each rank's part. Drafters keep vLLM's dummy weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hydraspec.models.checkpoint.reader import Checkpoint
from hydraspec.models.decoder import Decoder
from hydraspec.models.moe import one_by_one
from hydraspec.models.parts import held
from hydraspec.models.registry import TARGETS, load_target
from hydraspec.models.weights import EMPTY, drawn_whole

LOAD_FORMAT = "hydraspec"  # name of this loader in vLLM
EXTENSION = "hydraspec.adapters.vllm.worker.Extension"  # imported by every worker process
DUMMY_WEIGHTS = (
    "vLLM keeps its dummy weights, since the native engine draws none for it (an unknown or a "
    "quantised target): activations may become zeros, which take less time to multiply"
)
UNFILLED = "hydraspec_unfilled"  # the extension's method
_PLAIN = (torch.bfloat16, torch.float16, torch.float32)  # types of weights that are not quantised
_PACKED = ".mlp.experts."  # of DeepSeek, whose experts vLLM reads one by one


def is_known(opened: Checkpoint) -> bool:
    """Returns whether the native engine draws weights for this target as vLLM reads them: those of
    quantised matrices differ by engine."""
    return opened.config.get("model_type") in TARGETS and not opened.is_quantised


def random_weights(
    folder: Path, *, dtype: torch.dtype, device: torch.device, seed: int
) -> Iterator[tuple[str, Tensor]]:
    """Yields every weight of a target by its Hugging Face name, whole, as the native engine draws
    it on `device`; one at a time.

    The target must satisfy `is_known`.
    """
    shapes = load_target(
        str(folder),
        weights=EMPTY,
        dtype=dtype,
        device=torch.device("meta"),
        seed=seed,
        max_model_len=None,
    )
    assert isinstance(shapes, Decoder)
    tensors = {name: held(weight) for name, weight in shapes.tensors().items()}
    for name, tensor in drawn_whole(tensors, seed, device):
        prefix = "" if name.startswith("lm_head.") else "model."
        found = {prefix + name: tensor}
        for single, weight in (one_by_one(found) if _PACKED in name else found).items():
            yield single, held(weight)


@torch.no_grad()
def fill(model: nn.Module, weights: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Loads `weights` into a rank's model through the model's own `load_weights`.

    Returns:
        Names of parameters that were not filled, or only in part; the rest of them is set to zero.
    """
    loaded: Any = model
    parameters = {n: p for n, p in model.named_parameters() if p.dtype in _PLAIN}
    for parameter in parameters.values():
        parameter.fill_(torch.nan)
    loaded.load_weights(weights)
    missed = [name for name, parameter in parameters.items() if parameter.isnan().any()]
    for name in missed:
        parameters[name].nan_to_num_(nan=0.0)
    return missed


def order_tokens(model: nn.Module) -> None:
    """Gives the centroids of a Gemma 4 assistant their tokens in order. vLLM's dummy weights do not
    fill these ids, and uninitialised ids may lie outside the vocabulary.
    """
    for name, buffer in model.named_buffers():
        if name.endswith("token_ordering"):
            buffer.copy_(torch.arange(buffer.numel(), device=buffer.device).view_as(buffer))


def unequal_weights(engine: Any, opened: Checkpoint) -> list[str]:
    """Warnings about random weights of a running vLLM engine that differ from the native engine's;
    [] if there are none.
    """
    if not is_known(opened):
        return [DUMMY_WEIGHTS]
    found = sorted({name for names in engine.collective_rpc(UNFILLED) for name in names})
    if not found:
        return []
    named = ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
    return [f"vLLM has weights that the native engine has not, which are zero: {named}"]
