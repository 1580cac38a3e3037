"""Part `memcheck`: a slice of runs and kernel tests under compute-sanitizer."""

from __future__ import annotations

import re
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import processes
from device_tests import COLLECT_LIMIT_S, collected
from setting import NOT_RUN, PartResult, Result, Setting

PIECE_LIMIT_S = 300.0
ERROR_STATUS = 9
SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) errors?")
TOOLKITS = ("/usr/local/cuda/bin", "/usr/local/cuda/compute-sanitizer", "/opt/cuda/bin")
PIECES_AT_ONCE = 5  # on a GPU
LAUNCH_LIMIT_S = 120
KERNEL_PROCESSES = 3
PROBE = "import torch; print(float(torch.ones(3, device='cuda').sum()))"
# Without the caching allocator an access beyond a tensor is one beyond its allocation; captures
# need the allocator.
EXACT = {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}

SMALL = ["tracker=none", "workload.limit=4", "sampling.max_tokens=12", "engine.max_num_seqs=4"]
SAMPLED = ["sampling=stochastic", "sampling.temperature=1.3"]
# Longest first, by the seconds in docs/device.json: the part ends when its last piece does.
RUNS: dict[str, list[str]] = {
    "fp8-by-block-and-fp8-cache-eager-chunks": [
        *("target=tiny_gemma4_fp8_block", "method=gemma4_mtp", "target.dtype=bfloat16"),
        *("engine.kv_cache.dtype=fp8", "engine.max_num_batched_tokens=32"),
        *("cudagraph=none", "baseline=false"),
    ],
    "fp8-experts-eager": [
        *("target=tiny_gemma4_moe_fp8", "method=gemma4_mtp", "target.dtype=bfloat16"),
        *("cudagraph=none", "baseline=false"),
    ],
    "greedy-eager-chunks": [
        *("cudagraph=none", "engine.max_num_batched_tokens=32", "target.dtype=bfloat16"),
        "baseline=false",  # two engines without a caching allocator take over 300 s
    ],
    "all-truncations-block-eager": [
        *("target=tiny_qwen3", "method=peagle", "cudagraph=none", "baseline=false", *SAMPLED),
        *("sampling.top_k=20", "sampling.top_p=0.9", "sampling.min_p=0.02"),
        *("method.verification=block", "method.draft_sampling=probabilistic"),
    ],
    "four-bits-eager": [
        *("target=tiny_gemma4_w4a16", "method=eagle3", "target.dtype=bfloat16"),
        *("cudagraph=none", "baseline=false"),
    ],
    "experts-eager": [
        *("target=tiny_gemma4_moe", "method=gemma4_mtp", "cudagraph=none", "baseline=false"),
    ],
    "top_p-eager": [
        *("target=tiny_qwen3", "method=eagle3", "cudagraph=none", "baseline=false", *SAMPLED),
        *("sampling.top_k=0", "sampling.top_p=0.8", "method.draft_sampling=probabilistic"),
    ],
    "greedy-graphs-two-engines": ["cudagraph=full_and_piecewise"],
    "fp8-by-row-block-drafter-graphs": [
        *("target=tiny_qwen3_fp8", "method=dflash", "target.dtype=bfloat16"),
        *("cudagraph=full", "baseline=false"),
    ],
    "latent-attention-piecewise": [
        *("target=tiny_deepseek", "method=mtp", "cudagraph=piecewise", "baseline=false"),
    ],
}


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One process under the sanitizer."""

    name: str
    command: list[str]
    cwd: Path
    environment: dict[str, str]


def find_tool() -> str | None:
    """compute-sanitizer's path, from PATH or a CUDA toolkit."""
    return shutil.which("compute-sanitizer") or next(
        (found for folder in TOOLKITS if (found := shutil.which("compute-sanitizer", path=folder))),
        None,
    )


def run(setting: Setting) -> PartResult:
    """The part; not run, with the reason, where the tool is missing or cannot use the device."""
    started = time.monotonic()
    tool = find_tool()
    reason = "compute-sanitizer is neither on PATH nor in a CUDA toolkit" if tool is None else None
    results: list[Result] = []
    if tool is not None:
        checked = [tool, "--tool", "memcheck", f"--error-exitcode={ERROR_STATUS}"]
        checked += ["--target-processes", "application-only"]
        # The tool gives up on a program that does not reach the device in time, 10 s by itself,
        # and lets it run unchecked: importing torch takes longer where others do the same.
        checked += [f"--launch-timeout={LAUNCH_LIMIT_S}"]
        reason = _refusal(setting, checked)
        if reason is None:
            results = _run_pieces(setting, checked)
    seconds = time.monotonic() - started
    return PartResult(
        results=results, seconds=seconds, reason=reason, is_partial=bool(setting.only)
    )


def _refusal(setting: Setting, checked: list[str]) -> str | None:
    """Why the tool cannot work here: virtual machines refuse it the device."""
    probe = processes.run(
        [*checked, setting.python, "-c", PROBE],
        log=setting.work / "probe.txt",
        limit_s=setting.limit_s(PIECE_LIMIT_S),
        env=setting.environment("cuda"),
        cwd=setting.work,
    )
    said = probe.log.read_text(encoding="utf-8", errors="replace")
    if probe.status == 0 and num_errors(said) == 0:
        return None
    lines = [line for line in said.splitlines() if "rror" in line or "upported" in line]
    why = (lines or [probe.problem or "it said nothing"])[0].strip(" =")
    return f"compute-sanitizer cannot use this device: {why}"


def _run_pieces(setting: Setting, checked: list[str]) -> list[Result]:
    def one(piece: Piece) -> Result:
        limit_s = setting.limit_s(PIECE_LIMIT_S)
        if not limit_s:
            return Result(name=piece.name, status=NOT_RUN, notes=["the part's time was up"])
        ended = processes.run(
            [*checked, *piece.command],
            log=setting.work / f"{piece.name}.txt",
            limit_s=limit_s,
            env=piece.environment,
            cwd=piece.cwd,
        )
        result = judge(piece.name, ended)
        setting.say(f"{piece.name}: {result.status}, {ended.seconds:.0f} s")
        return result

    with ThreadPoolExecutor(PIECES_AT_ONCE * max(1, len(setting.gpus))) as pool:
        runs = [
            pool.submit(one, _run_piece(setting.on(i), name))
            for i, name in enumerate(setting.chosen(RUNS))
        ]
        shares = _shares_of_tests(setting)  # collected while the runs run
        tests = [
            pool.submit(one, _test_piece(setting.on(i), name, share))
            for i, (name, share) in enumerate(shares.items())
            if share  # pytest without names runs every test
        ]
        lacking = [name for name, share in shares.items() if not share]
        return [piece.result() for piece in (*runs, *tests)] + [_uncollected(n) for n in lacking]


def _run_piece(setting: Setting, name: str) -> Piece:
    overrides = [*SMALL, *RUNS[name], f"hydra.run.dir={setting.work / name}"]
    eager = "cudagraph=none" in RUNS[name]
    return Piece(
        name=name,
        command=[setting.python, "-m", "hydraspec", *overrides],
        cwd=setting.work,
        environment=setting.environment("cuda") | (EXACT if eager else {}),
    )


def _test_piece(setting: Setting, name: str, tests: list[str]) -> Piece:
    options = [
        "-q",
        "-p",
        "no:cacheprovider",
        "-p",
        "no:benchmark",
        "-p",
        "no:xdist",
        "-m",
        "gpu",
        "--timeout=240",
    ]
    return Piece(
        name=name,
        command=[setting.python, "-m", "pytest", *options, *tests],
        cwd=setting.tree,
        environment=setting.environment("cuda"),
    )


def _shares_of_tests(setting: Setting) -> dict[str, list[str]]:
    """The kernel tests of each chosen piece, by its name."""
    names = [f"kernels-{number}" for number in range(1, KERNEL_PROCESSES + 1)]
    chosen = setting.chosen(names)
    tests = first_of_each_file(_kernel_tests(setting)) if chosen else []
    return {name: tests[names.index(name) :: KERNEL_PROCESSES] for name in chosen}


def _uncollected(name: str) -> Result:
    result = Result(name=name)
    result.fail("no test was collected")
    return result


def _kernel_tests(setting: Setting) -> list[str]:
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:benchmark", "--collect-only", "-m", "gpu"]
    ended = processes.run(
        [setting.python, "-m", "pytest", *options, "tests/kernels"],
        log=setting.work / "collected.txt",
        limit_s=setting.limit_s(COLLECT_LIMIT_S),
        env=setting.environment("cuda"),
        cwd=setting.tree,
    )
    return collected(ended.log)


def first_of_each_file(tests: list[str]) -> list[str]:
    """One test for each test file, that is for each room of kernels."""
    first: dict[str, str] = {}
    for test in tests:
        first.setdefault(test.split("::")[0], test)
    return list(first.values())


def num_errors(said: str) -> int | None:
    """What the tool counted in a process; None if it did not come to that."""
    counts = SUMMARY.findall(said)
    return sum(map(int, counts)) if counts else None


def judge(name: str, ended: processes.Ended) -> Result:
    """A piece passes with exit status 0 and a count of 0."""
    said = ended.log.read_text(encoding="utf-8", errors="replace")
    count = num_errors(said)
    result = Result(name=name, figures={"errors": count, "seconds": round(ended.seconds, 1)})
    if count is None:
        result.fail("the sanitizer wrote no summary")
    elif count:
        result.fail(f"{count} errors")
    if ended.problem:
        result.fail(ended.problem)
    if result.problems:
        found = [line for line in said.splitlines() if line.startswith("=========")]
        result.log_tail = [*found[:20], *processes.tail(ended.log)]
    return result
