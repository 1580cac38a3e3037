"""Is the speculative output the target's own? Greedy outputs are compared token for token."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch

from hydraspec.engine.base import Engine, EngineInfo
from hydraspec.types import DTYPES, Completion, Request

ROUNDING_FACTOR = 8  # of eps(dtype) · max|logit|: what another order of summation may move a logit


@dataclass(slots=True, frozen=True, kw_only=True)
class Divergence:
    """Where a request's two outputs first differ."""

    request: str  # id
    index: int  # place in the workload
    position: int  # output tokens before it are equal
    target_margin: float  # the target's best logit minus its second best, after the common prefix
    allowed_margin: float  # 8 · eps(dtype) · max|logit| there
    method_token: int | None  # null: the output had ended
    baseline_token: int | None


@dataclass(slots=True, frozen=True, kw_only=True)
class Lossless:
    """The verdict over all requests that were checked."""

    verdict: Literal["identical", "numerical", "diverged", "not_checked"]
    num_requests_checked: int = 0
    num_requests_diverged: int = 0
    first_divergence: Divergence | None = None  # lowest request index
    first_beyond_margin: Divergence | None = None  # the one that decided "diverged"
    num_failed_with_method_only: int = 0  # requests, greedy or not, that the baseline finished
    num_failed_with_baseline_only: int = 0

    def to_json(self) -> dict[str, object]:
        """As summary.json holds it."""
        return dataclasses.asdict(self)


NOT_CHECKED = Lossless(verdict="not_checked")


def judge(
    requests: Sequence[Request],
    method: Mapping[int, Completion],
    baseline: Mapping[int, Completion],
    engine: Engine,
    *,
    synthetic: bool,
) -> Lossless:
    """Compare the outputs of requests that are greedy and finished on both sides, by request index.

    "numerical" if at every first difference the target's margin is within rounding, "diverged" if
    at any it is not. A request with an error on one side only is no equal output: "diverged" if the
    method failed a greedy request that the baseline finished; where the baseline failed one that
    the method finished, there is nothing to compare it with, and what would be "identical" is
    "not_checked". Synthetic verification, and a workload without greedy requests, is not checked.
    """
    lost = [r for r in requests if _failed(method, r) and _finished(baseline, r)]
    won = [r for r in requests if _finished(method, r) and _failed(baseline, r)]
    if synthetic:
        return Lossless(
            verdict="not_checked",
            num_failed_with_method_only=len(lost),
            num_failed_with_baseline_only=len(won),
        )
    checked = [
        r
        for r in sorted(requests, key=lambda r: r.index)
        if _is_greedy(r) and _finished(method, r) and _finished(baseline, r)
    ]
    differing = [
        r for r in checked if method[r.index].output_token_ids != baseline[r.index].output_token_ids
    ]
    first = beyond = None
    for request in differing:
        found = _divergence(request, method[request.index], baseline[request.index], engine)
        first = first or found
        if found.target_margin > found.allowed_margin:
            beyond = found
            break
    verdict: Literal["identical", "numerical", "diverged", "not_checked"] = "identical"
    if beyond or any(_is_greedy(r) for r in lost):
        verdict = "diverged"
    elif differing:
        verdict = "numerical"
    elif not checked or any(_is_greedy(r) for r in won):
        verdict = "not_checked"
    return Lossless(
        verdict=verdict,
        num_requests_checked=len(checked),
        num_requests_diverged=len(differing),
        first_divergence=first,
        first_beyond_margin=beyond,
        num_failed_with_method_only=len(lost),
        num_failed_with_baseline_only=len(won),
    )


def remarks(lossless: Lossless, info: EngineInfo) -> list[str]:
    """What a reader of the verdict should know besides, as warnings for the summary."""
    found = []
    sides = f"method={info.method}", "the baseline"
    for count, failed, finished in (
        (lossless.num_failed_with_method_only, *sides),
        (lossless.num_failed_with_baseline_only, *reversed(sides)),
    ):
        if count:
            requests = "1 request" if count == 1 else f"{count} requests"
            found.append(f"{requests} ended with an error in {failed} but not in {finished}")
    if lossless.verdict == "numerical" and info.greedy_is_exact:
        found.append(
            f"outputs differ within rounding, but {info.dtype} runs of engine={info.engine} are "
            "expected to be identical: please report this run"
        )
    return found


def _is_greedy(request: Request) -> bool:
    return request.sampling.temperature == 0


def _failed(completions: Mapping[int, Completion], request: Request) -> bool:
    completion = completions.get(request.index)
    return completion is not None and completion.finish_reason == "error"


def _finished(completions: Mapping[int, Completion], request: Request) -> bool:
    completion = completions.get(request.index)
    return completion is not None and completion.finish_reason != "error"


def _divergence(
    request: Request, ours: Completion, other: Completion, engine: Engine
) -> Divergence:
    a, b = ours.output_token_ids, other.output_token_ids
    shorter = min(len(a), len(b))
    position = next((i for i in range(shorter) if a[i] != b[i]), shorter)
    logits = engine.next_token_logits([*ours.prompt_token_ids, *a[:position]])
    best = np.sort(logits)[-2:]
    eps = torch.finfo(DTYPES[engine.info.dtype]).eps
    return Divergence(
        request=request.id,
        index=request.index,
        position=position,
        target_margin=float(best[-1] - best[0]),
        allowed_margin=float(ROUNDING_FACTOR * eps * np.abs(logits).max()),
        method_token=a[position] if position < len(a) else None,
        baseline_token=b[position] if position < len(b) else None,
    )
