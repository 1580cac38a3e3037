"""The benchmarks by the names of their choices in conf/bench."""

from __future__ import annotations

from hydraspec.bench.benchmark import Benchmark
from hydraspec.bench.decode import Decode
from hydraspec.bench.load import Load

BENCHMARKS: dict[str, Benchmark] = {"decode": Decode(), "load": Load()}
