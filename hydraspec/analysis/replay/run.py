"""Replays one run, from its folder to the content of replay.json."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from hydraspec.analysis.replay.record import Record, read_record
from hydraspec.analysis.replay.rules import Rule, read_rules
from hydraspec.analysis.replay.steps import Steps, replay
from hydraspec.metrics.draft_figures import ChainDrafts, ChainPlaces, draft_share, figures
from hydraspec.metrics.draft_lengths import drafts_name
from hydraspec.metrics.files import Json, pretty_json, write_whole
from hydraspec.metrics.run_files import REPLAY
from hydraspec.metrics.statistics import Estimate, ratio, ratio_of_sums

SCHEMA_VERSION = 1
EXACT_DTYPES = ("float32", "float64")


def replayed(folder: Path, typed: Sequence[str]) -> Json:
    """Replay the run in `folder` under the rules typed (key=value[,value…]).

    Returns:
        The content of replay.json; see docs/replay.md.

    Raises:
        ConfigurationError: no record, or a rule that cannot be replayed from it.
    """
    record = read_record(folder)
    rules = read_rules(typed, record)
    model_len = record.max_model_len
    as_run = [
        replay(request, Rule(num_speculative_tokens=record.num_drafts), model_len)
        for request in record.requests
    ]
    results = []
    cut: set[str] = {steps.id for steps in as_run if steps.is_cut}
    for rule in rules:
        steps = [replay(request, rule, model_len) for request in record.requests]
        cut |= {each.id for each in steps if each.is_cut}
        results.append(_result(rule, steps, is_estimate=record.source == "trace"))
    summary = record.run.summary
    why = _why_estimated(record, num_cut=len(cut))
    return {
        "schema_version": SCHEMA_VERSION,
        "run": str(folder),
        "target": summary["target"],
        "method": summary["method"],
        "num_speculative_tokens": record.num_drafts,
        "drafts": drafts_name(summary),
        "source": record.source,
        "kind": "estimate" if why else "exact",
        "why_estimate": why,
        "num_requests": len(record.requests),
        "num_requests_left_out": record.num_left_out,
        "check": _check(record, as_run),
        "replays": results,
        "figures": _figures(record),
        "draft_share_of_step": draft_share(summary["time_breakdown_ms"]),
    }


def write(result: Json, folder: Path) -> Path:
    """Write replay.json to the run's folder and return its path."""
    path = folder / REPLAY
    write_whole(path, pretty_json(result))
    return path


def _why_estimated(record: Record, *, num_cut: int) -> list[str]:
    """Reasons why a run may differ from the replay; empty if the replay is exact."""
    why = []
    if record.source == "trace":
        why.append(
            "an ordinary trace has the drafts of the steps that were taken: other steps are taken "
            "to be accepted as these are"
        )
    if sampled := record.num_sampled:
        why.append(f"{sampled} requests were sampled: other steps would have drawn other tokens")
    if (dtype := record.run.summary["dtype"]) not in EXACT_DTYPES:
        why.append(f"in {dtype} near ties of logits may fall otherwise in steps of another size")
    if num_cut and not sampled and record.source == "positions":
        why.append(f"of {num_cut} requests the target's tokens after the end are not known")
    return why


def _check(record: Record, as_run: Sequence[Steps]) -> Json | None:
    """Comparison of the counts of a replay under the run's own rule with the run's; None where K
    was not constant, which no rule states."""
    if record.is_adaptive:
        return None
    counted = ("num_drafts", "drafted_per_position", "accepted_per_position")
    equal = [
        all(request.row[key] == getattr(steps, key) for key in counted)
        for request, steps in zip(record.requests, as_run, strict=True)
    ]
    return {
        "num_requests_equal": sum(equal),
        "num_requests_different": len(equal) - sum(equal),
        "num_preemptions": record.run.summary["num_preemptions"],
    }


def _figures(record: Record) -> Json | None:
    """The `figures` of replay.json: where the recorded drafts are accepted, over all places whose K
    next tokens are known; None without such places."""
    k, parts = record.num_drafts, []
    for request in record.requests:
        count = int((request.num_known == k).sum())  # fewer are known only towards the end
        if request.forced is not None and count:
            parts.append((request, request.forced, count))
    if not parts:
        return None
    ranks = np.concatenate([request.ranks[:n] for request, _, n in parts])
    drafts = ChainDrafts(
        matches=ranks == 1,
        ranks=ranks,
        probs=np.concatenate([forced.target_probs[:n] for _, forced, n in parts]),
        num_of=tuple(n for _, _, n in parts),
    )
    places = ChainPlaces(
        output_place=np.concatenate([np.arange(1, n + 1) for _, _, n in parts]),
        context=np.concatenate([r.num_prompt + np.arange(1, n + 1) for r, _, n in parts]),
        entropy=np.concatenate([forced.entropies[:n] for _, forced, n in parts]),
    )
    return figures(drafts, places, None)


def _result(rule: Rule, steps: Sequence[Steps], *, is_estimate: bool) -> Json:
    k = rule.num_speculative_tokens
    drafted = None if rule.min_probability else _columns(steps, "drafted_per_position", k)
    accepted = _columns(steps, "accepted_per_position", k)
    num_drafts = _total(steps, [each.num_drafts for each in steps])
    num_draft_tokens = None
    if drafted is not None:  # at depth i a tree has candidates ** (i + 1) nodes
        num_draft_tokens = sum(
            count * rule.candidates ** (i + 1) for i, count in enumerate(drafted)
        )
    num_steps = _total(steps, [each.num_steps for each in steps])
    return {
        "rule": asdict(rule),
        "name": rule.name,
        "num_steps": num_steps,
        "num_drafts": num_drafts,
        "num_draft_tokens": num_draft_tokens,
        "num_accepted_tokens": sum(accepted),
        "tokens_per_step": ratio(sum(each.num_tokens for each in steps), num_steps),
        "acceptance_length": asdict(_acceptance(steps)),
        "acceptance_rate": None
        if num_draft_tokens is None
        else ratio(sum(accepted), num_draft_tokens),
        "acceptance_rate_per_position": [ratio(count, num_drafts) for count in accepted],
        "acceptance_length_by_category": {
            category: _acceptance([s for s in steps if s.category == category]).mean
            for category in dict.fromkeys(each.category for each in steps)
            if category is not None
        },
        "requests": None
        if is_estimate
        else [
            {
                "id": each.id,
                "num_steps": each.num_steps,
                "num_drafts": each.num_drafts,
                "drafted_per_position": each.drafted_per_position or None,
                "accepted_per_position": each.accepted_per_position,
            }
            for each in steps
        ],
    }


def _columns(steps: Sequence[Steps], name: str, k: int) -> list[int]:
    table = np.array([getattr(each, name) for each in steps]).reshape(-1, k)
    return [_total(steps, column) for column in table.T]


def _total(steps: Sequence[Steps], counts: Sequence[int] | NDArray[np.int64]) -> int:
    """The sum of counts of requests' steps, scaled to the steps that a run takes."""
    return round(sum(each.scale * int(n) for each, n in zip(steps, counts, strict=True)))


def _acceptance(steps: Sequence[Steps]) -> Estimate:
    accepted = [each.scale * each.num_accepted for each in steps]
    return ratio_of_sums(accepted, [each.scale * each.num_drafts for each in steps], offset=1.0)
