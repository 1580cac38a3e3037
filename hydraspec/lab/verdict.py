"""The lossless verdict: greedy outputs of method and baseline, compared token for token."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch

from hydraspec.engine.base import Engine, EngineInfo
from hydraspec.metrics.lossless import LOW_PRECISION, rounds_inputs
from hydraspec.metrics.summary import Divergence, Lossless
from hydraspec.types import DTYPES, Completion, Image, Request, by_digest, images_of

ROUNDING_FACTOR = 8  # times eps(dtype) · max|logit|: effect of another order of summation
# Times max|logit|, where inputs are rounded to e4m3: an order of summation decides which of two
# numbers an eighth apart a value becomes, and all later layers differ (ADR 40).
E4M3_ROUNDING = 0.125
SAMPLED = "sampled"
SYNTHETIC = "synthetic verification"
NOT_FINISHED = "no greedy request was finished with the method and with the baseline"
NOT_FINITE = "the target's logits are NaN or infinite"
WITHOUT_MARGINS = (
    "outputs differ, and engine={0.engine} gives no logits, so that in {0.dtype} rounding cannot "
    "be told from an error"
)


def not_checked(
    reason: str, requests: Sequence[Request], method: Mapping[int, Completion]
) -> Lossless:
    """The verdict of a run in which nothing was compared."""
    return {
        "verdict": "not_checked",
        "reason": reason,
        "num_requests_checked": 0,
        "num_requests_diverged": 0,
        "num_requests_sampled": sum(not _is_greedy(r) and _finished(method, r) for r in requests),
        "num_turns_not_checked": 0,
        "first_divergence": None,
        "first_beyond_margin": None,
        "num_failed_with_method_only": 0,
        "num_failed_with_baseline_only": 0,
        "distribution": None,
        "kv_cache": None,
        "not_finite_in": None,
    }


def judge(
    requests: Sequence[Request],
    method: Mapping[int, Completion],
    baseline: Mapping[int, Completion],
    engine: Engine,
    *,
    synthetic: bool,
) -> Lossless:
    """Compare the outputs of requests that are greedy and finished on both sides, by request index.

    The verdict is "numerical" if at every first difference the target's margin is within rounding,
    "diverged" if at any it is not. It is "diverged" too if the method failed a greedy request that
    the baseline finished; if the baseline failed one that the method finished, "identical" becomes
    "not_checked", as that output has nothing to be compared with. Synthetic verification, and a
    workload without greedy requests, is not checked. If no outputs differ, the logits of one
    request are examined, and the verdict is "not_checked" if they are not finite. A later turn of a
    conversation is compared if both sides read the same prompt; if the answers before it differ,
    the turn is only counted. An engine without logits gives no margin: different outputs are then
    "not_checked" in bfloat16 and float16, where ties are frequent, else "diverged".
    """
    found = not_checked(SYNTHETIC, requests, method)
    others = [r for r in requests if _have_other_prompts(r, method, baseline)]
    left_out = {r.index for r in others}
    requests = [r for r in requests if r.index not in left_out]
    failed_here = [r for r in requests if _failed(method, r) and _finished(baseline, r)]
    failed_in_baseline = [r for r in requests if _finished(method, r) and _failed(baseline, r)]
    found["num_turns_not_checked"] = sum(map(_is_greedy, others))
    found["num_failed_with_method_only"] = len(failed_here)
    found["num_failed_with_baseline_only"] = len(failed_in_baseline)
    if synthetic:
        return found
    checked = [
        r
        for r in sorted(requests, key=lambda r: r.index)
        if _is_greedy(r) and _finished(method, r) and _finished(baseline, r)
    ]
    differing = [
        r for r in checked if method[r.index].output_token_ids != baseline[r.index].output_token_ids
    ]
    found["num_requests_checked"] = len(checked)
    found["num_requests_diverged"] = len(differing)
    logits = _Logits(engine, requests)
    first, beyond = _first_and_beyond(differing, method, baseline, logits)
    found["first_divergence"], found["first_beyond_margin"] = first, beyond
    if not differing:
        found["not_finite_in"] = look_at_logits(requests, method, engine)
    elif beyond and math.isnan(beyond["target_margin"] or 0.0):
        found["not_finite_in"] = beyond["request"]
    diverged = beyond is not None or any(_is_greedy(r) for r in failed_here)
    found["reason"] = (
        None if diverged else _why_not(found, requests, failed_in_baseline, engine.info)
    )
    if diverged:
        found["verdict"] = "diverged"
    elif found["reason"] is None:
        found["verdict"] = "numerical" if differing else "identical"
    return found


def _why_not(
    found: Lossless, requests: Sequence[Request], failed: Sequence[Request], info: EngineInfo
) -> str | None:
    """The reason for "not_checked"; None if outputs are equal, or differ within rounding."""
    if first := found["first_divergence"]:
        return WITHOUT_MARGINS.format(info) if first["target_margin"] is None else None
    if not any(_is_greedy(r) for r in requests):
        return SAMPLED
    if found["not_finite_in"] is not None:
        return NOT_FINITE
    if num_failed := sum(_is_greedy(r) for r in failed):
        return f"the baseline failed {num_failed} greedy request{'s' * (num_failed > 1)}"
    return None if found["num_requests_checked"] else NOT_FINISHED


def _have_other_prompts(
    request: Request, method: Mapping[int, Completion], baseline: Mapping[int, Completion]
) -> bool:
    """Returns whether a turn has another prompt on each side, as the answers before it differ."""
    ours, other = method.get(request.index), baseline.get(request.index)
    if request.after is None or ours is None or other is None:
        return False
    return ours.prompt != other.prompt


def _is_greedy(request: Request) -> bool:
    return request.sampling.temperature == 0


def _failed(completions: Mapping[int, Completion], request: Request) -> bool:
    completion = completions.get(request.index)
    return completion is not None and completion.finish_reason == "error"


def _finished(completions: Mapping[int, Completion], request: Request) -> bool:
    completion = completions.get(request.index)
    return completion is not None and completion.finish_reason != "error"


def look_at_logits(
    requests: Sequence[Request], completions: Mapping[int, Completion], engine: Engine
) -> str | None:
    """The id of the first finished request if its last token came from logits that are NaN or
    infinite, else None; None too from engines that check every step's logits, or give none."""
    if engine.info.checks_logits:
        return None
    request = next((r for r in requests if _finished(completions, r)), None)
    if request is None:
        return None
    ended = completions[request.index]
    logits = _Logits(engine, requests).of(ended, len(ended.output_token_ids) - 1)
    return None if logits is None or np.isfinite(logits.max()) else request.id


class _Logits:
    """The target's logits in outputs of some requests, among them earlier turns of each."""

    def __init__(self, engine: Engine, requests: Sequence[Request]) -> None:
        self.info, self._engine = engine.info, engine
        self._images: dict[str, Image] = {}
        self._sampling = {request.index: request.sampling for request in requests}
        for request in requests:
            self._images |= by_digest(request.spans, request.images)

    def of(self, ended: Completion, position: int) -> np.ndarray | None:
        """Logits [V] for the output token at `position`, under the request's rules; None from an
        engine that gives none."""
        tokens = [*ended.prompt_token_ids, *ended.output_token_ids[:position]]
        images = images_of(ended.spans, self._images)
        given = {"spans": ended.spans, "images": images}
        sampling, num_prompt = self._sampling[ended.index], len(ended.prompt_token_ids)
        return self._engine.logits_under(sampling, tokens, num_prompt, **given)


def _first_and_beyond(
    differing: Sequence[Request],
    method: Mapping[int, Completion],
    baseline: Mapping[int, Completion],
    logits: _Logits,
) -> tuple[Divergence | None, Divergence | None]:
    """The first divergence, and the first whose margin is not within rounding; None without one."""
    first = None
    for request in differing:
        found = _divergence(request, method[request.index], baseline[request.index], logits)
        first = first or found
        if _is_beyond_rounding(found, logits.info.dtype):
            return first, found
    return first, None


def _is_beyond_rounding(found: Divergence, dtype: str) -> bool:
    margin, allowed = found["target_margin"], found["allowed_margin"]
    if margin is None or allowed is None:
        return dtype not in LOW_PRECISION
    return not margin <= allowed  # NaN is beyond it


def _divergence(
    request: Request, ours: Completion, other: Completion, logits: _Logits
) -> Divergence:
    a, b = ours.output_token_ids, other.output_token_ids
    shorter = min(len(a), len(b))
    position = next((i for i in range(shorter) if a[i] != b[i]), shorter)
    found = logits.of(ours, position)
    margin, allowed = (None, None) if found is None else _margins(found, logits.info)
    return {
        "request": request.id,
        "index": request.index,
        "position": position,
        "target_margin": margin,
        "allowed_margin": allowed,
        "method_token": a[position] if position < len(a) else None,
        "baseline_token": b[position] if position < len(b) else None,
    }


def _margins(logits: np.ndarray, info: EngineInfo) -> tuple[float, float]:
    """Best minus second best of `logits` [V], and what rounding allows there."""
    second, best = np.sort(logits)[-2:]  # NaN sorts last
    largest = np.abs(logits[np.isfinite(logits)]).max(initial=0.0)  # suppressed tokens are at -inf
    margin = float(best - second) if np.isfinite(best) else math.nan
    allowed = ROUNDING_FACTOR * torch.finfo(DTYPES[info.dtype]).eps
    if rounds_inputs(info.quantization, info.dtype):
        allowed = max(allowed, E4M3_ROUNDING)
    return margin, float(allowed * largest)
