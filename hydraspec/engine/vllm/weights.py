"""Random weights inside vLLM, drawn as in every engine, in place of vLLM's dummy weights.

The distribution is the same, the numbers are not: vLLM joins tensors, and names them otherwise.

With numbers of at most 0.001 everywhere, norms and layer scalars among them, the residual stream of
Gemma 4 becomes exact zeros on its way up. Zeros take a chip at its power limit less time to
multiply: vLLM prefills the 31B shape in 1.36 s with its dummy weights and in 1.57 s with these.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from hydraspec.config.schema import RunConfig, Weights
from hydraspec.models.weights import randomise

DUMMY_WEIGHTS = (
    "vLLM runs in several processes and keeps its dummy weights, with which activations may become "
    "zeros: its times flatter it"
)


def randomise_target(engine: Any, config: RunConfig) -> list[str]:
    """Fill the target of a vllm.LLMEngine where config.target.weights is random; returns warnings.

    The drafter keeps vLLM's weights. What it captured before reads the new ones: they are written
    in place.
    """
    if config.target.weights is not Weights.random:
        return []
    parallelism = config.parallelism
    if parallelism.tensor * parallelism.pipeline * parallelism.data > 1:
        return [DUMMY_WEIGHTS]

    def fill(model: nn.Module) -> None:
        found = model.state_dict()  # parameters, and the layers' scalars, which are buffers
        randomise({n: t for n, t in found.items() if t.is_floating_point()}, config.seed)

    with torch.inference_mode():  # where vLLM made some of them
        engine.apply_model(fill)
    return []
