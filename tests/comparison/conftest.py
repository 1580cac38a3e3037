"""Fixtures for runs without a model."""

from fake_runs import config, run_config, use_engine, workload_file

__all__ = ["config", "run_config", "use_engine", "workload_file"]
