"""Matrix of legal combinations: the configuration's rules applied to every combination of choices,
and, for each legal one, the tests that run it.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from hydraspec import factory
from hydraspec.cli.arguments import Parser
from hydraspec.cli.compose import plan
from hydraspec.cli.folders import writing
from hydraspec.config.checks import ALIASES, check
from hydraspec.config.choices import choices_of, packaged_drafters
from hydraspec.config.messages import listing, nearest, refusal
from hydraspec.config.rules import did_you_mean
from hydraspec.config.schema import RunConfig
from hydraspec.errors import ConfigurationError

# In tables target and method make rows, the engine makes a table, and parallelism makes columns.
AXES = ("target", "method", "engine", "parallelism", "cudagraph", "sampling")
GROUPS = AXES[2:]  # groups that are replaced in the configuration of a target and a method
ZOO = "tiny_"
NO_DRAFTER = "the target's YAML names no drafter for it: give method.checkpoint"
GATE = "make verify-gpu PART=cells"
OF_RANKS = "tests/engine/test_engines_of_ranks.py"


@dataclass(slots=True, frozen=True, kw_only=True)
class Cell:
    """A combination of choices; `reason` says why it is refused, and is None if it is legal."""

    choices: Mapping[str, str]  # by axis
    reason: str | None = None
    tests: tuple[str, ...] = ()


GEMMA = (
    *("tiny_gemma4", "tiny_gemma4_e", "tiny_gemma4_moe", "tiny_gemma4_unified"),
    "tiny_gemma4_images",
)
OTHERS = ("tiny_deepseek", "tiny_ministral3", "tiny_mistral", "tiny_qwen3")
QUANTISED = (
    *("tiny_deepseek_fp8", "tiny_gemma4_fp8", "tiny_gemma4_moe_fp8", "tiny_gemma4_w4a16"),
    *("tiny_mistral_fp8", "tiny_qwen3_fp8"),
)
RAGGED = "tiny_gemma4_fp8_block"  # whose blocks no ranks divide
VLLM_DRAFTERS = ("eagle", "eagle3", "gemma4_mtp", "mtp", "peagle")
DRAFTERS = (*VLLM_DRAFTERS, "dflash", "dspark", "dflash2")
GRAPHS = ("full", "full_and_piecewise", "full_decode_only", "piecewise")


def _native(*parallelism: str, **covers: Sequence[str]) -> dict[str, Sequence[str]]:
    return {"engine": ("native",), "parallelism": parallelism, **covers}


# Tests (file::function, or a command) with the choices that each runs; it runs all choices of an
# axis that is not named. Over ranks a CPU runs without graphs; the graphs of ranks are those of one
# device, and test_engines_of_devices runs every pair with them.
PROOFS: dict[str, Mapping[str, Sequence[str]]] = {
    GATE: _native("single"),
    "tests/engine/test_fuzz_gemma4.py::test_configurations_decode_as_the_plain_engine": _native(
        "single", target=GEMMA, method=DRAFTERS
    ),
    "tests/engine/test_fuzz_others.py::test_configurations_decode_as_the_plain_engine": _native(
        "single", target=OTHERS, method=DRAFTERS
    ),
    "tests/engine/test_fuzz_quantised.py::test_configurations_decode_as_the_plain_engine": _native(
        "single", target=(*QUANTISED, RAGGED), method=DRAFTERS
    ),
    "tests/engine/test_graph_modes.py::test_every_mode_gives_the_tokens_of_eager_steps": _native(
        "single",
        target=("tiny_gemma4", "tiny_deepseek", "tiny_mistral", "tiny_qwen3"),
        method=DRAFTERS,
        cudagraph=GRAPHS,
        sampling=("greedy",),
    ),
    "tests/engine/test_stochastic.py::test_sampled_runs_follow_the_target": _native(
        "single", target=("tiny_gemma4",), method=("gemma4_mtp",), sampling=("stochastic",)
    ),
    "tests/engine/test_tensor_parallel.py::test_two_ranks_give_what_one_process_gives": _native(
        "tp2", method=DRAFTERS
    ),
    f"{OF_RANKS}::test_ranks_choose_the_tokens_of_one": _native(
        "tp2", "tp4", target=(*GEMMA, *OTHERS), method=("none",)
    ),
    f"{OF_RANKS}::test_ranks_of_a_quantised_target_choose_the_tokens_of_one": _native(
        "tp2", "tp4", target=(*QUANTISED, RAGGED), method=("none",)
    ),
    "tests/engine/test_tensor_parallel.py::test_fuzzed_engines_on_ranks": _native(
        "tp2", "tp4", method=DRAFTERS
    ),
    "tests/engine/test_pipeline.py::test_every_target_with_every_drafter_in_two_stages": _native(
        "pp2"
    ),
    "tests/engine/test_pipeline.py::test_four_stages_decode_as_one_process": _native("pp4"),
    "tests/engine/test_pipeline.py::test_every_pair_in_two_stages_of_two_ranks": _native("tp2_pp2"),
    "tests/engine/test_replicas.py::test_two_replicas_of_the_zoo": _native("dp2"),
    "tests/engine/test_engines_of_devices.py::test_on_devices": _native(
        "tp2", "tp4", "pp2", "pp4", sampling=("greedy",)
    ),
    "tests/adapters/test_transformers_engine.py::test_plain_tokens_equal_the_native_engines": {
        "engine": ("transformers",),
        "method": ("none",),
    },
    "tests/adapters/test_transformers_engine.py::test_assisted_tokens_equal_the_native_engines": {
        "engine": ("transformers",),
        "method": ("gemma4_mtp",),
    },
    "tests/adapters/test_vllm_mapping.py::test_one_key_changes_one_argument": {"engine": ("vllm",)},
    "tests/adapters/test_vllm_mapping.py::test_the_speculative_configuration": {
        "engine": ("vllm",),
        "method": VLLM_DRAFTERS,
    },
}


def axes(wanted: Mapping[str, Sequence[str]] | None = None) -> dict[str, tuple[str, ...]]:
    """The choices of every axis: those wanted, by default all, but of targets only the zoo's, which
    tests run.

    Raises:
        ConfigurationError: an axis or a choice does not exist.
    """
    known = {axis: tuple(c for c in choices_of(axis) if c not in ALIASES) for axis in AXES}
    found = {**known, "target": tuple(name for name in known["target"] if name.startswith(ZOO))}
    for axis, choices in (wanted or {}).items():
        if axis not in known:
            meant = nearest(axis, AXES)
            raise ConfigurationError(
                f"{axis} is no axis of the matrix\n  allowed: {listing(AXES)}\n"
                f"  to do: {f'did you mean {meant}?' if meant else 'choose one of these'}"
            )
        for choice in choices:
            if choice not in known[axis]:
                remedy = did_you_mean(axis, choice, known[axis], f"write {axis}=<choice>,<choice>")
                raise refusal(
                    axis, choice, "is no choice", allowed=listing(known[axis]), remedy=remedy
                )
        found[axis] = tuple(choices)
    return found


def cells(wanted: Mapping[str, Sequence[str]] | None = None) -> Iterator[Cell]:
    """Every combination of the choices of `axes`, in their order."""
    chosen = axes(wanted)
    groups = {
        axis: {name: _config(f"{axis}={name}", "method=none") for name in chosen[axis]}
        for axis in GROUPS
    }
    for target, method in itertools.product(chosen["target"], chosen["method"]):
        has_drafter = method == "none" or method in packaged_drafters(target)
        base = _config(f"target={target}", f"method={method}") if has_drafter else None
        for names in itertools.product(*(chosen[axis] for axis in GROUPS)):
            taken = {
                axis: getattr(groups[axis][name], axis)
                for axis, name in zip(GROUPS, names, strict=True)
            }
            reason = NO_DRAFTER if base is None else _reason(replace(base, **taken, warnings=[]))
            choices = dict(zip(AXES, (target, method, *names), strict=True))
            yield Cell(choices=choices, reason=reason, tests=() if reason else _tests(choices))


def _config(*overrides: str) -> RunConfig:
    return plan(overrides).jobs[0].config


def _reason(config: RunConfig) -> str | None:
    try:
        check(config)
        factory.check_adapter_split(config)
    except ConfigurationError as error:
        return str(error).partition("\n")[0]
    return None


def _tests(choices: Mapping[str, str]) -> tuple[str, ...]:
    """The tests that run a combination."""
    return tuple(
        test
        for test, covers in PROOFS.items()
        if all(choices[axis] in covered for axis, covered in covers.items())
    )


def tables(found: Sequence[Cell]) -> str:
    """Markdown with a table per engine, a row per pair of target and method, and a column per
    parallelism. If graph mode or sampling decides, the cell names the legal ones. Reasons of
    refusal are numbered, and listed below the tables."""
    reasons: dict[str, int] = {}
    engines: dict[str, dict[tuple[str, str], dict[str, list[Cell]]]] = {}
    for cell in found:
        target, method, engine, split = (cell.choices[axis] for axis in AXES[:4])
        places = engines.setdefault(engine, {}).setdefault((target, method), {})
        places.setdefault(split, []).append(cell)
    text = []
    for engine, rows in engines.items():
        splits = next(iter(rows.values()))
        text += [f"## engine={engine}", "", f"| target | method | {' | '.join(splits)} |"]
        text.append("|" + "---|" * (2 + len(splits)))
        for names, places in rows.items():
            if any(cell.reason != NO_DRAFTER for cell in itertools.chain(*places.values())):
                said = [_said(place, reasons) for place in places.values()]
                text.append(f"| {' | '.join([*names, *said])} |")
        text.append("")
    text += [f"[{number}] {reason}" for reason, number in reasons.items()]
    return "\n".join(text).rstrip() + "\n"


def _said(of_place: Sequence[Cell], reasons: dict[str, int]) -> str:
    """Text of a place in a table: whether all its graph modes and ways of sampling are legal."""
    refused = [cell.reason for cell in of_place if cell.reason]
    if not refused:
        return "yes"
    numbers = [reasons.setdefault(reason, len(reasons) + 1) for reason in dict.fromkeys(refused)]
    marks = "".join(f"[{number}]" for number in numbers)
    if len(refused) == len(of_place):
        return f"no {marks}"
    legal = {
        axis: list(dict.fromkeys(c.choices[axis] for c in of_place if not c.reason))
        for axis in ("cudagraph", "sampling")
    }
    return "; ".join(f"{axis}={','.join(names)}" for axis, names in legal.items()) + f" {marks}"


def main(argv: Sequence[str]) -> None:
    """Print the tables, and with --json write every cell as JSON."""
    parser = Parser(
        "matrix",
        description="What combines with what, and which test runs it.",
        epilog=f"Axes: {', '.join(AXES)}. A target that is not named is one of the zoo's.",
    )
    parser.add_argument("choices", nargs="*", metavar="axis=a,b", help="look at these choices only")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every cell with its tests")
    args = parser.parse_args(argv)
    wanted = {}
    for word in args.choices:
        axis, _, names = word.partition("=")
        wanted[axis] = names.split(",")
    found = list(cells(wanted))
    if args.json is not None:
        lines = ",\n".join("  " + json.dumps(asdict(cell)) for cell in found)
        with writing(args.json):
            args.json.write_text(f"[\n{lines}\n]\n", encoding="utf-8")
    legal = [cell for cell in found if cell.reason is None]
    sys.stdout.write(tables(found))
    sys.stdout.write(f"\n{len(legal)} of {len(found)} combinations are legal.\n")
