"""Whether a sweep's answer is right: ten sweeps of 16 prompts each, against one of many prompts.

    python tests/bench/sweep_answers.py [sweeps] [prompts of the truth] [folder]

Each sweep has other prompts of the tiny family. Prints for each whether the job it names is within
3 % of the best by the truth, whether it tied `none` with it, and its time. 10 sweeps and a truth of
400 prompts take about half an hour on two idle cores; 2,000 prompts an hour more.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from hydraspec.zoo.recipe.corpus import workload_lines

say = Console(soft_wrap=True, markup=False, highlight=False).print
PROMPTS = 16
SWEEP = (
    *("-m", "method=none,gemma4_mtp,eagle3,peagle", "method.num_speculative_tokens=1,3,5"),
    *("workload=jsonl", "workload.concurrency=4", "tracker=none"),
)
WITHIN = 0.03
Job = tuple[str, int]


def swept(lines: list[str], folder: Path) -> tuple[dict[str, Any], float]:
    """compare.json of a sweep over these prompts, and its seconds."""
    folder.mkdir(parents=True)
    file = folder / "prompts.jsonl"
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
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


def speedups(found: dict[str, Any]) -> dict[Job, float]:
    return {
        (row["method"], row["num_speculative_tokens"]): row["speedup"]["mean"]
        for row in found["rows"]
        if row["speedup"]
    }


def main(sweeps: int = 10, prompts_of_truth: int = 400, folder: Path | None = None) -> None:
    folder = folder or Path(tempfile.mkdtemp())
    lines = list(workload_lines(per_category=(sweeps * PROMPTS + prompts_of_truth) // 4))
    found, seconds = swept(lines[sweeps * PROMPTS :], folder / "truth")
    truth = speedups(found)
    best = max(truth, key=lambda job: truth[job])
    say(f"truth over {prompts_of_truth} prompts ({seconds:.0f} s): ", end="")
    say(", ".join(f"{method} K={k} {ratio:.3f}x" for (method, k), ratio in sorted(truth.items())))
    right = ties = 0
    for number in range(sweeps):
        part = lines[number * PROMPTS : (number + 1) * PROMPTS]
        found, seconds = swept(part, folder / str(number))
        answer = found["answer"]
        job = answer["method"], answer["num_speculative_tokens"]
        share = truth.get(job, 1.0) / truth[best]
        tied = any(row["method"] == "none" and not row["told_from_best"] for row in found["rows"])
        right, ties = right + (share >= 1 - WITHIN), ties + tied
        say(
            f"{number}: {job[0]} K={job[1]} is {share:.3f} of the best"
            f"{', none is tied with it' if tied else ''}; {seconds:.0f} s; {answer['sentence']}"
        )
    say(f"within {WITHIN:.0%} of the best: {right} of {sweeps}; none tied: {ties} of {sweeps}")
    say(f"folders: {folder}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]), *map(Path, sys.argv[3:]))
