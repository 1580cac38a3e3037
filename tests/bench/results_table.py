"""The first table of docs/results.md: every tiny target with every drafter it names, measured here.

    python tests/bench/results_table.py [override ...]      # for example target=tiny_qwen3

Prints a markdown table and where the runs are. Overrides go to every run.
"""

from __future__ import annotations

import sys
from importlib.resources import files

import yaml
from rich.console import Console

import hydraspec

DRAFTS = {"mtp": 1}  # K, where it is not 3


def pairs(only: str | None) -> list[tuple[str, str]]:
    found = []
    for entry in sorted(files("hydraspec.conf").joinpath("target").iterdir(), key=lambda e: e.name):
        name = entry.name.removesuffix(".yaml")
        if name.startswith("tiny_") and only in (None, name):
            drafters = yaml.safe_load(entry.read_text()).get("drafters") or {}
            found += [(name, method) for method in drafters]
    return found


def row(target: str, method: str, overrides: list[str]) -> str:
    k = DRAFTS.get(method, 3)
    summary = hydraspec.run(
        [
            f"target={target}",
            f"method={method}",
            f"method.num_speculative_tokens={k}",
            "tracker=none",
            *overrides,
        ]
    )
    length, speedup = summary["acceptance_length"], summary["speedup"]
    cells = [
        target,
        method,
        str(k),
        f"{length['mean']:.2f} ({length['ci95'][0]:.2f} to {length['ci95'][1]:.2f})",
        f"{speedup['mean']:.2f}x ({speedup['ci95'][0]:.2f} to {speedup['ci95'][1]:.2f})",
        f"{summary['accuracy']['exact_match']:.2f}",
        summary["lossless"]["verdict"],
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    only = [word.removeprefix("target=") for word in sys.argv[1:] if word.startswith("target=")]
    overrides = [word for word in sys.argv[1:] if not word.startswith("target=")]
    lines = [
        "| target | method | K | acceptance length | speedup | exact match | verdict |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [row(target, method, overrides) for target, method in pairs(only[0] if only else None)]
    Console(width=200, soft_wrap=True).print("\n".join(lines), markup=False)


if __name__ == "__main__":
    main()
