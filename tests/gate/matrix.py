"""The cells: every pair as a user types it, and a pairwise covering set of every other option."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path

import yaml
from covering import covering_set

PLAIN_REQUESTS = 64
COVERED_REQUESTS = 20

SAMPLING = {
    "greedy": ["sampling=greedy"],
    "temperature": ["sampling.top_k=0", "sampling.top_p=1.0"],
    "top_k": ["sampling.top_k=12", "sampling.top_p=1.0"],
    "top_p": ["sampling.top_k=0", "sampling.top_p=0.8"],
    "min_p": ["sampling.top_k=0", "sampling.top_p=1.0", "sampling.min_p=0.05"],
    "all": ["sampling.top_k=20", "sampling.top_p=0.9", "sampling.min_p=0.02"],
}
# The tiny targets are sure of themselves: at 1.0 hardly a draw differs from the greedy token.
STOCHASTIC = ["sampling=stochastic", "sampling.temperature=1.3"]
CUDAGRAPH = ["none", "piecewise", "full", "full_decode_only", "full_and_piecewise"]


@dataclass(frozen=True, kw_only=True)
class Cell:
    """A run on the device, and its twin on the CPU."""

    name: str
    overrides: tuple[str, ...]
    dtype: str = "float32"
    is_greedy: bool = True
    is_typed: bool = False  # in its own process, through the command line
    shared_twin: str | None = None  # the CPU's run, which several cells are held beside
    on_device: tuple[str, ...] = ()  # overrides that the CPU's run leaves out

    @property
    def twin(self) -> str:
        """Name of the CPU's run: float32's, also for bfloat16."""
        return self.shared_twin or self.name.replace("bfloat16", "float32")

    @property
    def mirrored(self) -> Cell:
        """The cell that the CPU runs."""
        overrides = tuple(each.replace("bfloat16", "float32") for each in self.overrides)
        return replace(self, name=self.twin, overrides=overrides, on_device=(), dtype="float32")


ROUNDED = "_fp8"  # in names of targets whose activations are rounded to FP8
PACKED = "_w4a16"  # in names of targets with packed weights, whose activations are not


def is_quantised(target: str) -> bool:
    """Returns whether a target's weights are quantised."""
    return ROUNDED in target or PACKED in target


# Drafters without weights, which no YAML names: they run with every target.
COPYING = (("tiny_qwen3", "ngram"), ("tiny_gemma4", "suffix"), ("tiny_qwen3", "suffix"))


# Its drafts are fewer where steps are launched ahead, as they are on a device alone (ADR 47).
WAITING = ("engine.async_scheduling=false",)


def pairs(tree: Path) -> list[tuple[str, str]]:
    """Every tiny target with every drafter that its YAML names, and those of COPYING."""
    found = []
    for file in sorted((tree / "conf" / "target").glob("tiny_*.yaml")):
        drafters = yaml.safe_load(file.read_text(encoding="utf-8")).get("drafters") or {}
        found += [(file.stem, method) for method in drafters]
    return [*found, *COPYING]


# Pairs of float targets that the covering set leaves out: another has their family of target or
# drafter, and each costs a cell for every way of sampling.
UNCROSSED = {
    ("tiny_gemma4_unified", "gemma4_mtp"),
    ("tiny_gemma4_images", "gemma4_mtp"),
    ("tiny_gemma4_images", "eagle3"),
    ("tiny_ministral3", "eagle"),
    ("tiny_gemma4", "dspark"),
    ("tiny_qwen3", "dflash"),
    *COPYING[:2],
}


def crossed_pairs(found: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """The pairs that the covering set crosses: those of float targets, one of each family."""
    return [pair for pair in found if not is_quantised(pair[0]) and pair not in UNCROSSED]


def plain_cells(found: Sequence[tuple[str, str]]) -> list[Cell]:
    """Each pair on 64 prompts of the README's command, in float32 and bfloat16; of float targets
    the first is typed.

    Rounding of activations carries sums that differ in their last bits a step of FP8 apart: such
    targets run in bfloat16 alone (`format_cells`), beside which the CPU's float32 excuses rounding.
    """
    return [
        Cell(
            name=f"plain-{target}-{method}-{dtype}",
            overrides=(
                f"target={target}",
                f"method={method}",
                f"target.dtype={dtype}",
                f"workload.limit={PLAIN_REQUESTS}",
                *(WAITING if (method, dtype) == ("suffix", "float32") else ()),
            ),
            dtype=dtype,
            is_typed=dtype == "float32" and not is_quantised(target),
        )
        for dtype in ("float32", "bfloat16")
        for target, method in found
        if not is_quantised(target) or (dtype == "float32" and ROUNDED not in target)
    ]


UNCACHED = "tiny_deepseek"  # holds no keys and values of heads, which are what FP8 caches hold


def format_cells(found: Sequence[tuple[str, str]]) -> list[Cell]:
    """Each pair of a quantised target in every graph mode; a third of them over an FP8 cache, half
    of them in chunks, with one, four or 16 requests at once."""
    quantised = [pair for pair in found if is_quantised(pair[0])]
    cells = []
    for (i, (target, method)), (j, graphs) in product(enumerate(quantised), enumerate(CUDAGRAPH)):
        is_rounded = (i + j) % 3 == 0 and not target.startswith(UNCACHED)
        is_chunked = (i + j) % 2 == 1
        concurrency = ("4", "16", "1")[(2 * i + j) % 3]
        base = f"format-{target}-{method}{'-kv_fp8' if is_rounded else ''}"
        cells.append(
            Cell(
                name=f"{base}-{graphs}-c{concurrency}{'-chunks' if is_chunked else ''}",
                overrides=(
                    f"target={target}",
                    f"method={method}",
                    "target.dtype=bfloat16",
                    f"engine.kv_cache.dtype={'fp8' if is_rounded else 'auto'}",
                    f"workload.limit={COVERED_REQUESTS}",
                ),
                on_device=(
                    f"cudagraph={graphs}",
                    f"workload.concurrency={concurrency}",
                    f"engine.max_num_batched_tokens={'104' if is_chunked else '2048'}",
                ),
                dtype="bfloat16",
                shared_twin=f"{base}-float32",
            )
        )
    return cells


def rounded_kv_cells() -> list[Cell]:
    """Runs of float targets over an FP8 cache, in bfloat16 as those of targets whose activations
    are rounded. 104 rows a step cut prompts into chunks, which the paged kernel attends."""
    wanted = (
        ("tiny_gemma4", "gemma4_mtp", "full", "104"),
        ("tiny_gemma4", "eagle3", "piecewise", "2048"),
        ("tiny_gemma4", "dflash", "full_decode_only", "104"),
        ("tiny_qwen3", "eagle3", "full_and_piecewise", "2048"),
        ("tiny_mistral", "eagle", "none", "2048"),
    )
    return [
        Cell(
            name=f"kv_fp8-{target}-{method}-{graphs}-bfloat16",
            overrides=(
                f"target={target}",
                f"method={method}",
                "target.dtype=bfloat16",
                "engine.kv_cache.dtype=fp8",
                f"cudagraph={graphs}",
                f"engine.max_num_batched_tokens={rows}",
                f"workload.limit={COVERED_REQUESTS}",
            ),
            dtype="bfloat16",
        )
        for target, method, graphs, rows in wanted
    ]


def copying_cells() -> list[Cell]:
    """Runs of n-gram, which the covering set has no room for, in the graph modes that its typed run
    leaves out."""
    target, method = COPYING[0]
    return [
        Cell(
            name=f"copied-{target}-{method}-{graphs}-float32",
            overrides=(
                f"target={target}",
                f"method={method}",
                "target.dtype=float32",
                f"cudagraph={graphs}",
                f"workload.limit={COVERED_REQUESTS}",
            ),
        )
        for graphs in CUDAGRAPH[:-1]
    ]


PICTURED = "tiny_gemma4_images"


def pictured_cells(found: Sequence[tuple[str, str]]) -> list[Cell]:
    """Runs of workload=images with each drafter of the target that reads pictures. 104 rows hold
    a picture and cut prompts of two."""
    return [
        Cell(
            name=f"images-{method}-{graphs}-{dtype}",
            overrides=(
                f"target={target}",
                f"method={method}",
                "workload=images",
                f"target.dtype={dtype}",
                f"cudagraph={graphs}",
                f"engine.max_num_batched_tokens={rows}",
            ),
            dtype=dtype,
        )
        for dtype, graphs, rows in (
            ("float32", "full_and_piecewise", "104"),
            ("bfloat16", "full", "2048"),
        )
        for target, method in found
        if target == PICTURED
    ]


PENALTIES = (
    "sampling.presence_penalty=0.5",
    "sampling.frequency_penalty=0.2",
    "sampling.repetition_penalty=1.1",
    "sampling.min_tokens=12",
    "sampling.logit_bias={36:1.5,400:-3}",
    "sampling.bad_words=[[226],[13,14]]",
)
SCHEMA = (
    "sampling.structured.json={type: object, properties: {name: {type: string, maxLength: 12}, "
    "age: {type: integer, minimum: 0, maximum: 150}}, required: [name, age]}"
)
SAMPLED_DRAFTS = ("method.draft_sampling=probabilistic", "method.verification=block")


def ruled_cells() -> list[Cell]:
    """Runs under rules on logits and under grammars: greedy, and with sampled drafts."""
    wanted = (
        ("penalties", "tiny_qwen3", "eagle3", True, "full_and_piecewise", PENALTIES),
        ("penalties", "tiny_gemma4", "gemma4_mtp", False, "full", PENALTIES),
        ("grammar", "tiny_qwen3", "eagle3", True, "full_and_piecewise", (SCHEMA,)),
        ("grammar", "tiny_gemma4", "gemma4_mtp", False, "full", (SCHEMA,)),
    )
    return [
        Cell(
            name=f"{rules}-{target}-{method}-{graphs}",
            is_greedy=greedy,
            overrides=(
                f"target={target}",
                f"method={method}",
                f"cudagraph={graphs}",
                *(() if greedy else (*STOCHASTIC, *SAMPLING["min_p"], *SAMPLED_DRAFTS)),
                *typed,
                f"workload.limit={COVERED_REQUESTS}",
            ),
        )
        for rules, target, method, greedy, graphs, typed in wanted
    ]


def factors(found: Sequence[tuple[str, str]]) -> dict[str, list[str]]:
    """What the covering set crosses."""
    return {
        "pair": [f"{target}-{method}" for target, method in found],
        "sampling": list(SAMPLING),
        "verification": ["standard", "block"],
        "drafts": ["greedy", "probabilistic"],
        "cudagraph": CUDAGRAPH,
        "concurrency": ["1", "4", "16"],
        "async": ["true", "false"],
        "k": ["1", "3", "5"],
        "baseline": ["true", "false"],
        "rows": ["2048", "104"],  # of a step: 104 cuts prompts into chunks beside decodes
    }


def covered_cells(found: Sequence[tuple[str, str]]) -> list[Cell]:
    """The covering set as cells, numbered; the same on every machine."""
    crossed = crossed_pairs(found)
    split = {f"{target}-{method}": (target, method) for target, method in crossed}
    cells = []
    for number, row in enumerate(covering_set(factors(crossed))):
        target, method = split[row["pair"]]
        greedy = row["sampling"] == "greedy"
        cells.append(
            Cell(
                name=_name(number, row),
                is_greedy=greedy,
                overrides=(
                    f"target={target}",
                    f"method={method}",
                    *([] if greedy else STOCHASTIC),
                    *SAMPLING[row["sampling"]],
                    f"method.verification={row['verification']}",
                    f"method.draft_sampling={row['drafts']}",
                    f"cudagraph={row['cudagraph']}",
                    f"workload.concurrency={row['concurrency']}",
                    f"engine.async_scheduling={row['async']}",
                    f"method.num_speculative_tokens={row['k']}",
                    f"baseline={row['baseline']}",
                    f"engine.max_num_batched_tokens={row['rows']}",
                    f"workload.limit={COVERED_REQUESTS}",
                    f"seed={number}",
                ),
            )
        )
    return cells


def _name(number: int, row: dict[str, str]) -> str:
    words = [
        f"set{number:02}",
        row["pair"],
        row["sampling"],
        "block" if row["verification"] == "block" else "",
        "sampled_drafts" if row["drafts"] == "probabilistic" else "",
        row["cudagraph"],
        f"c{row['concurrency']}",
        "async" if row["async"] == "true" else "sync",
        f"k{row['k']}",
        "baseline" if row["baseline"] == "true" else "",
        "chunks" if row["rows"] != "2048" else "",
    ]
    return "-".join(word for word in words if word)
