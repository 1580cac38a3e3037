"""Whether a sweep's answer is right: ten sweeps of 16 prompts each, against 2,000 prompts.

    python tests/bench/sweep_answers.py [sweeps] [prompts of the truth] [folder] [first prompt]

Each sweep has other prompts of the tiny family. The truth is the plain throughput of all jobs over
further prompts, in turns of 100 prompts a job between the sweeps, so that both meet the same
machine; each turn is a line of truth.jsonl, and a call with the same folder goes on after the last.
Prints for each sweep whether the job that it names is within 3 % of the best by the truth, whether
it tied `none` with it, and its time. 10 sweeps and 2,000 prompts take 35 minutes on an idle core.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

import hydraspec
from hydraspec.cli.from_python import planned_call
from hydraspec.engine.base import Engine, closing_run
from hydraspec.lab.rounds import Measurement
from hydraspec.metrics.sinks import Side
from hydraspec.types import Request
from hydraspec.workloads import reading
from hydraspec.zoo.recipe.corpus import workload_lines

say = Console(soft_wrap=True, markup=False, highlight=False).print
PROMPTS, PART = 16, 100
DRAFTERS, DRAFTS, AT_ONCE = ("gemma4_mtp", "eagle3", "peagle"), (1, 3, 5), 4
NONE = ("none", 0)
SWEEP = (
    *("-m", f"method=none,{','.join(DRAFTERS)}"),
    f"method.num_speculative_tokens={','.join(map(str, DRAFTS))}",
    *("workload=jsonl", f"workload.concurrency={AT_ONCE}", "tracker=none"),
)
WITHIN = 0.03
Job = tuple[str, int]


def written(lines: list[str], file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return file


def swept(lines: list[str], folder: Path) -> tuple[dict[str, Any], float]:
    """compare.json of a sweep over these prompts, and its seconds."""
    file = written(lines, folder / "prompts.jsonl")
    began = time.monotonic()
    command = [sys.executable, "-m", "hydraspec", *SWEEP, f"workload.path={file}"]
    done = subprocess.run(
        [*command, f"hydra.sweep.dir={folder / 'jobs'}"],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr[-2000:])
    seconds = time.monotonic() - began
    return json.loads((folder / "jobs" / "compare.json").read_text(encoding="utf-8")), seconds


class Truth:
    """Plain throughput of every job over many prompts, measured part by part."""

    def __init__(self, lines: list[str], folder: Path) -> None:
        self.file = folder / "truth.jsonl"
        path = written(lines, folder / "truth_prompts.jsonl")
        planned = planned_call("run", ["workload=jsonl", f"workload.path={path}"])
        workload = reading.read(planned.jobs[0].config)
        assert workload is not None
        self.requests = workload.requests
        self.engines: dict[Job, Engine] = {NONE: hydraspec.build_engine(["method=none"])}
        for name in DRAFTERS:
            for k in DRAFTS:
                typed = [f"method={name}", f"method.num_speculative_tokens={k}"]
                self.engines[name, k] = hydraspec.build_engine(typed)
        self.engines[NONE].tokenize(self.requests)
        for engine in self.engines.values():
            self._measurement(engine, self.requests[:PROMPTS]).warm_up()

    def _measurement(self, engine: Engine, requests: list[Request]) -> Measurement:
        return Measurement({Side.method: engine}, requests, [], concurrency=AT_ONCE)

    def parts(self) -> list[dict[Job, list[float]]]:
        """Tokens and milliseconds of decode steps by job, of each part so far."""
        lines = self.file.read_text(encoding="utf-8").splitlines() if self.file.exists() else []
        return [{(name, k): sums for name, k, *sums in json.loads(line)} for line in lines]

    def measure(self, num_parts: int) -> None:
        """Measure until there are so many parts; jobs begin and end in turn."""
        for number in range(len(self.parts()), num_parts):
            part = self.requests[number * PART : (number + 1) * PART]
            part = [replace(request, index=i) for i, request in enumerate(part)]
            jobs = list(np.roll(np.arange(len(self.engines)), -number))
            row = []
            for place in jobs[:: -1 if number % 2 else 1]:
                job, engine = list(self.engines.items())[place]
                made = self._measurement(engine, part)
                with closing_run(engine, part, AT_ONCE) as events:
                    for event in events:
                        made.record(Side.method, event)
                done = made.method.meter.completed
                sums = [sum(c.decode_tokens for c in done), sum(c.decode_ms for c in done)]
                row.append([*job, *sums])
            with self.file.open("a", encoding="utf-8") as out:
                out.write(json.dumps(row) + "\n")

    def speedups(self) -> dict[Job, float]:
        """Throughput over that of no drafts; prints it with its standard error over parts."""
        parts = self.parts()
        sums = {job: np.array([part[job] for part in parts]) for job in self.engines}
        rates = {job: of[:, 0].sum() / of[:, 1].sum() for job, of in sums.items()}
        plain = np.log(sums[NONE][:, 0] / sums[NONE][:, 1])
        for job, of in sums.items():
            logs = np.log(of[:, 0] / of[:, 1]) - plain
            error = logs.std(ddof=1) / np.sqrt(len(parts))
            say(f"{job[0]} K={job[1]}: {rates[job] / rates[NONE]:.3f}x, error {error:.1%}")
        return {job: float(rate / rates[NONE]) for job, rate in rates.items()}


def main(sweeps: int = 10, prompts: int = 2000, folder: Path | None = None, first: int = 0) -> None:
    folder = folder or Path(tempfile.mkdtemp())
    lines = list(workload_lines(per_category=(first + sweeps * PROMPTS + prompts) // 4 + 1))[first:]
    truth = Truth(lines[sweeps * PROMPTS :], folder)
    answers = []
    for number in range(sweeps):
        part = lines[number * PROMPTS : (number + 1) * PROMPTS]
        found, seconds = swept(part, folder / str(number))
        tied = any(row["method"] == "none" and not row["told_from_best"] for row in found["rows"])
        answers.append((found["answer"], tied, seconds))
        truth.measure(prompts // PART * (number + 1) // sweeps)
    known = truth.speedups()
    shares = []
    for number, (answer, tied, seconds) in enumerate(answers):
        job = answer["method"], answer["num_speculative_tokens"]
        shares.append(known.get(job, 1.0) / max(known.values()))
        say(
            f"{number}: {job[0]} K={job[1]} is {shares[-1]:.3f} of the best"
            f"{', none is tied with it' if tied else ''}; {seconds:.0f} s; {answer['sentence']}"
        )
    right, ties = sum(s >= 1 - WITHIN for s in shares), sum(tied for _, tied, _ in answers)
    say(f"within {WITHIN:.0%} of the best: {right} of {sweeps}; none tied: {ties} of {sweeps}")
    say(f"folders: {folder}")


if __name__ == "__main__":
    numbers = [int(each) for each in sys.argv[1:3]]
    main(*numbers, *map(Path, sys.argv[3:4]), *map(int, sys.argv[4:5]))
