"""Gated activations: GELU (tanh form, Hendrycks and Gimpel 2016; Gemma) or SiLU (Shazeer 2020,
SwiGLU; Llama, Qwen, Mistral) of the gate branch times the up branch.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def gated_activation_reference(gate_up: Tensor) -> Tensor:
    """gate_up [..., 2I], gate half first -> gelu_tanh(gate) * up, [..., I]."""
    gate, up = gate_up.chunk(2, -1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def gated_silu_reference(gate_up: Tensor) -> Tensor:
    """gate_up [..., 2I], gate half first -> silu(gate) * up, [..., I]."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)
