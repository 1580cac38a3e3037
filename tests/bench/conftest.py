"""Fixtures of benchmarks whose engines are fake, and of runs beside them."""

from fake_runs import build, config, run_config, use_engine, workload_file
from studied_runs import studied

__all__ = ["build", "config", "run_config", "studied", "use_engine", "workload_file"]
