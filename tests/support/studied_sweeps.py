"""Sweeps of run folders whose speedups, K and numbers of prompts a test sets."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from studied_runs import configure, edit, edit_rows

DRAFTS = 100  # verifications of each request


def pace(run: Path, speedup: float, *, spread: float = 0.01) -> None:
    """A run so many times as fast as its baseline in every request, give or take `spread`."""
    number = iter(range(1000))

    def change(row: dict[str, Any]) -> None:
        wobble = 1 + spread * (-1) ** next(number)
        row["decode_ms"] = row["baseline"]["decode_ms"] / speedup * wobble
        row["num_drafts"] = DRAFTS
        k = len(row["accepted_per_position"])
        row["accepted_per_position"] = [90 - 10 * i for i in range(k)]

    edit_rows(run, change)


def of_drafts(run: Path, k: int, speedup: float) -> Path:
    """A job of gemma4_mtp with K drafts."""
    configure(run, method__num_speculative_tokens=k, method__name="gemma4_mtp")
    edit(run, num_speculative_tokens=k, method="gemma4_mtp")
    typed = ["method=gemma4_mtp", f"method.num_speculative_tokens={k}", "workload.limit=6"]
    (run / "overrides.yaml").write_text("".join(f"- {one}\n" for one in typed), encoding="utf-8")
    edit_rows(run, lambda row: row.update(accepted_per_position=[0] * k))
    pace(run, speedup)
    return run


def sized(run: Path, key: str = "workload.limit", most: int | None = None) -> Path:
    """A run whose six prompts are set by `key`, of a workload that has `most`; None: any number."""
    return edit(run, workload_size={"key": key, "value": 6, "most": most})
