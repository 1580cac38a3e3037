"""The fixture of benchmarks whose engines are fake."""

from fake_runs import build

__all__ = ["build"]
