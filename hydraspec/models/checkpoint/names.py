"""Names of checkpoints and of the tensors in them, where families agree."""

from __future__ import annotations

_TEXT_PREFIXES = ("model.language_model.", "language_model.model.", "model.")


def name_in_text_model(name: str) -> str:
    """A tensor's name without the prefix that a multimodal wrapper or the text model puts before
    it; `lm_head.weight` wherever the head stands.
    """
    if name.endswith("lm_head.weight"):
        return "lm_head.weight"
    for prefix in _TEXT_PREFIXES:
        if name.startswith(prefix):
            return name.removeprefix(prefix)
    return name


def name_in_model(name: str) -> str:
    """A tensor's name without the leading `model.`."""
    return name.removeprefix("model.")
