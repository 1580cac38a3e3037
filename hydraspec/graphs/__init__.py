"""CUDA graphs for any callable over batch descriptors, independent of models and engines."""

from __future__ import annotations

from hydraspec.graphs.capture import CudaGraphBackend, GraphBackend, Replayable
from hydraspec.graphs.manager import Captured, Descriptor, GraphManager
from hydraspec.graphs.modes import (
    MODES,
    PROMPT_ROWS,
    GraphModes,
    default_capture_sizes,
    mixed_row_sizes,
    no_graphs,
    resolve_modes,
)

__all__ = [
    "MODES",
    "PROMPT_ROWS",
    "Captured",
    "CudaGraphBackend",
    "Descriptor",
    "GraphBackend",
    "GraphManager",
    "GraphModes",
    "Replayable",
    "default_capture_sizes",
    "mixed_row_sizes",
    "no_graphs",
    "resolve_modes",
]
