"""Fixtures for runs without a model."""

from fake_runs import build, config, run_config, use_engine, workload_file

__all__ = ["build", "config", "run_config", "use_engine", "workload_file"]
