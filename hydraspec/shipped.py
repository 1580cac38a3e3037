"""Checkpoints and shapes that ship with the package: how they are written, and where they are."""

from __future__ import annotations

from pathlib import Path

ZOO_PREFIX = "zoo:"  # of a tiny trained checkpoint or a workload, "zoo:<name>"
SHAPE_PREFIX = "shape:"  # of a public checkpoint's config.json without weights, "shape:<name>"
ZOO = Path(__file__).resolve().parent / "zoo" / "checkpoints"
SHAPES = Path(__file__).resolve().parent / "models" / "shapes"
