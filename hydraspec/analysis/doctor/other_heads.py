"""The doctor.json of a drafter whose head cannot be changed part by part: one of another package, a
block drafter, or one without weights. It has the acceptance length of a run; the fields that need
changes of the head are null or empty.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from hydraspec.analysis.doctor.patient import Patient
from hydraspec.metrics.counters import RequestCounters, RunningTotals
from hydraspec.metrics.files import Json
from hydraspec.types import Completion, Request


def as_json(patient: Patient, requests: Sequence[Request], reason: str) -> Json:
    """The content of doctor.json, from a greedy run with drafts over tokenised requests; `reason`
    says why the head cannot be changed.
    """
    config, spec = patient.config, patient.speculator.spec
    totals, num_texts = RunningTotals(), 0
    for event in patient.engine.run(patient.greedy(requests), concurrency=None):
        if isinstance(event, Completion):
            num_texts += event.finish_reason != "error"
            continue
        for step in event.requests:
            RequestCounters(index=step.index).add(step, 0.0, totals)
    length = totals.acceptance_length
    found = "it drafted nothing" if length is None else f"acceptance is {length:.2f}"
    return {
        "verdict": None,
        "sentence": f"Cannot tell: {found}, and what would change it is not tried: {reason}.",
        "cause": None,
        "module": None,
        "evidence": [],
        "expected_acceptance_length": None,
        "target": config.target.name,
        "method": config.method.name,
        "drafter": config.method.checkpoint,
        "num_speculative_tokens": patient.k,
        "num_texts": num_texts,
        "num_starts": totals.num_drafts,
        "acceptance": length,
        "best_acceptance": None,
        "causes": [],
        "drafter_in_words": [] if spec is None else [f"Its conventions: {spec}."],
        "draft_spec": None if spec is None else asdict(spec),
        "tensors": None,
        "prompts": [],
        "rounds": [],
        "figures": None,
    }
