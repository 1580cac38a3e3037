"""Configurations of targets that transformers does not know, registered for vLLM to read.

vLLM has MiMo's model, and expects its configuration's class from the checkpoint's own code. A class
here takes its place: a public shape has no code, and code of a checkpoint is not run.
"""

from __future__ import annotations

from transformers import AutoConfig, Qwen2Config


class MiMoConfig(Qwen2Config):  # type: ignore[misc]
    """Qwen2's configuration, with num_nextn_predict_layers MTP layers (XiaomiMiMo/MiMo-7B-RL)."""

    model_type = "mimo"


def register() -> None:
    """Makes the configurations known to transformers; a second call changes nothing."""
    AutoConfig.register(MiMoConfig.model_type, MiMoConfig, exist_ok=True)
