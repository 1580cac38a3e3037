"""Fixtures for run folders without a model."""

from fake_runs import config, use_engine, workload_file
from studied_runs import studied

__all__ = ["config", "studied", "use_engine", "workload_file"]
