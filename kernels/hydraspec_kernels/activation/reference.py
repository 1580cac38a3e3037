"""Gated activations: GELU (tanh form, Hendrycks and Gimpel 2016; Gemma) or SiLU (Shazeer 2020,
SwiGLU; Llama, Qwen, Mistral) of the gate branch times the up branch; and the soft cap (Gemma 2).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def gated_activation_reference(gate_up: Tensor, activation: str) -> Tensor:
    """See `hydraspec_kernels.activation.gated_activation`."""
    gate, up = gate_up.chunk(2, -1)
    activated = F.silu(gate) if activation == "silu" else F.gelu(gate, approximate="tanh")
    return activated.mul_(up)


def soft_cap_reference_(logits: Tensor, softcap: float) -> Tensor:
    """See `hydraspec_kernels.activation.soft_cap_`."""
    return logits.div_(softcap).tanh_().mul_(softcap)
