"""Target models, draft heads, layers over a paged KV cache, and checkpoint reading."""

from __future__ import annotations

from hydraspec.models.base import TargetModel
from hydraspec.models.registry import load_target

__all__ = ["TargetModel", "load_target"]
