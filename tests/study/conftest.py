"""Fixtures for runs without a model."""

from fake_runs import config, run_config, use_engine, workload_file
from studied_runs import studied

__all__ = ["config", "run_config", "studied", "use_engine", "workload_file"]
