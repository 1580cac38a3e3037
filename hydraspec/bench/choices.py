"""The benchmarks by the names of their choices in conf/bench."""

from __future__ import annotations

from hydraspec.bench.benchmark import Benchmark
from hydraspec.bench.context import Context
from hydraspec.bench.decode import Decode
from hydraspec.bench.load import Load
from hydraspec.bench.serve import Serve
from hydraspec.bench.turns import Turns

BENCHMARKS: dict[str, Benchmark] = {
    "context": Context(),
    "decode": Decode(),
    "load": Load(),
    "serve": Serve(),
    "turns": Turns(),
}
