"""Fixtures of benchmarks whose engines are fake, and of runs beside them."""

import sys
from pathlib import Path

from fake_runs import build, config, run_config, use_engine, workload_file
from studied_runs import studied

__all__ = ["build", "config", "run_config", "studied", "use_engine", "workload_file"]

sys.path.insert(0, str(Path(__file__).parent))  # scripts here import each other by name
