"""Rules on logits with every drafter of the zoo: the outputs of method=none, and its distribution.

Power: a total variation distance of 0.15 has a noncentrality of at least 4 n 0.15^2 = 108 at n =
1,200, which a chi-squared test with at most 84 degrees of freedom at alpha 1e-4 finds with
probability above 0.95. The distribution is exact: products of fresh prefills under transformers'
processors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest
import torch
from grids import slow_unless
from hydraspec_kernels.sampling import rules
from hydraspec_kernels.sampling.rules import reference
from sampled_cells import exact_cells, p_value
from zoo_engines import DRAFTERS, engine_of

from hydraspec.adapters.transformers.rules import processors
from hydraspec.engine.native import NativeEngine
from hydraspec.speculators import draft_model
from hydraspec.speculators.eagle import EagleSpeculator
from hydraspec.types import Completion, Request, SamplingParams, StepRecord

PROBABILISTIC = "method.draft_sampling=probabilistic"
IN_EVERY_SUITE = ("eagle3",)
ALPHA, NUM_REQUESTS, LENGTH, MOST_LIKELY = 1e-4, 1_200, 3, 4
PROMPTS = ([5, 6, 7, 5, 6, 7, 5, 6], [9, 9, 10, 11, 9, 9], [40, 41, 42, 43, 44])


@pytest.fixture(scope="module", autouse=True)
def _closed() -> Iterator[None]:
    yield
    engine_of.cache_clear()
    sampled.cache_clear()
    banned.cache_clear()


def outputs(engine: NativeEngine, requests: list[Request]) -> tuple[list[list[int]], int]:
    """Tokens of each request, and how many drafts were accepted."""
    found: dict[int, list[int]] = {}
    num_accepted = 0
    for event in engine.run(requests, concurrency=None):
        if isinstance(event, Completion):
            assert event.error is None
            found[event.index] = event.output_token_ids
        elif isinstance(event, StepRecord):
            num_accepted += sum(each.num_accepted for each in event.requests)
    return [found[request.index] for request in requests], num_accepted


def ruled_requests() -> list[Request]:
    """Greedy requests with one rule each, with all, and with none, in one batch."""
    settings = [
        SamplingParams(max_tokens=24),
        SamplingParams(max_tokens=24, presence_penalty=1.5),
        SamplingParams(max_tokens=24, frequency_penalty=0.7),
        SamplingParams(max_tokens=24, repetition_penalty=1.4),
        SamplingParams(max_tokens=24, repetition_penalty=0.8, ignore_eos=True),
        SamplingParams(max_tokens=24, logit_bias=((5, 4.0), (9, -8.0), (17, 6.0))),
        SamplingParams(max_tokens=24, bad_words=((6,), (9, 10), (5, 6, 7))),
        SamplingParams(max_tokens=24, min_tokens=20, stop_token_ids=(5, 9, 12)),
        SamplingParams(
            max_tokens=24,
            presence_penalty=0.5,
            frequency_penalty=0.3,
            repetition_penalty=1.1,
            logit_bias=((6, 3.0),),
            bad_words=((9,), (6, 6)),
            min_tokens=9,
        ),
    ]
    pairs = [(prompt, sampling) for sampling in settings for prompt in PROMPTS]
    return [
        Request(index=i, id=str(i), sampling=sampling, prompt_token_ids=list(prompt))
        for i, (prompt, sampling) in enumerate(pairs)
    ]


FEW_SLOTS = ("engine.max_num_seqs=5", "engine.max_num_batched_tokens=64")


@cache
def ruled_without_drafts(target: str) -> list[list[int]]:
    """The tokens of `ruled_requests`, which end as they are asked to."""
    plain, _ = outputs(engine_of(target, "none", *FEW_SLOTS), ruled_requests())
    without = [
        Request(
            index=i,
            id=str(i),
            sampling=SamplingParams(max_tokens=24),
            prompt_token_ids=list(prompt),
        )
        for i, prompt in enumerate(PROMPTS)
    ]
    unruled, _ = outputs(engine_of(target, "none", *FEW_SLOTS), without)
    assert plain[: len(PROMPTS)] == unruled
    for tokens, request in zip(plain, ruled_requests(), strict=True):
        if request.sampling.min_tokens:
            assert len(tokens) > request.sampling.min_tokens or len(tokens) == 24
    return plain


@pytest.mark.parametrize(
    ("method", "target"),
    slow_unless(
        lambda method, _: method not in ("eagle", "peagle", "dflash2", "suffix"), DRAFTERS.items()
    ),
)
def test_greedy_outputs_under_rules_are_those_without_drafts(method: str, target: str) -> None:
    """More requests than slots, so that slots change owners; chunks of prompts beside decodes."""
    drafted, num_accepted = outputs(engine_of(target, method, *FEW_SLOTS), ruled_requests())
    assert drafted == ruled_without_drafts(target)
    assert num_accepted > 0


def drafts_of(engine: NativeEngine, sampling: SamplingParams) -> Counter[int]:
    requests = ruled_requests()[: len(PROMPTS)]
    proposed: Counter[int] = Counter()
    for event in engine.run(
        [replace(each, sampling=sampling) for each in requests], concurrency=None
    ):
        if isinstance(event, StepRecord):
            proposed.update(token for each in event.requests for token in each.draft_token_ids)
    return proposed


@pytest.mark.parametrize("method", ["gemma4_mtp", "eagle", "eagle3", "mtp"])
def test_drafters_of_one_token_at_a_time_propose_nothing_banned(method: str) -> None:
    """Ends before the least length, and one-token bans of what is drafted without rules."""
    engine = engine_of(DRAFTERS[method], method, *FEW_SLOTS)
    ends = engine.parts.target.eos_token_ids
    without = drafts_of(engine, SamplingParams(max_tokens=24))
    (first, _), (second, _) = [each for each in without.most_common(4) if each[0] not in ends][:2]
    sampling = SamplingParams(
        max_tokens=24, min_tokens=32, bad_words=((first,),), logit_bias=((second, -100.0),)
    )
    drafted = drafts_of(engine, sampling)
    assert drafted.total() > 0
    assert not drafted.keys() & {first, second, *ends}


def test_drafters_look_for_bans_only_where_some_request_has_any(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*_: object) -> torch.Tensor:
        raise AssertionError("bans are applied")

    monkeypatch.setattr(draft_model, "without_bans", refused)
    engine = engine_of("tiny_qwen3", "eagle3", *FEW_SLOTS)
    assert drafts_of(engine, SamplingParams(max_tokens=8, presence_penalty=1.5)).total() > 0
    with pytest.raises(AssertionError, match="bans are applied"):
        drafts_of(engine, SamplingParams(max_tokens=8, min_tokens=4))


TEXT = (  # of a kind that the zoo's drafters draft well
    "Write a function sum_tiles that goes over tiles, adds 5 for each tile above 13 and sums them "
    "up in index."
)


@dataclass(slots=True)
class Sampled:
    """A prompt, rules, and the probabilities of the first LENGTH tokens under them."""

    prompt: list[int]
    sampling: SamplingParams
    cells: dict[tuple[int, ...], float]


@cache
def sampled(target: str) -> Sampled:
    """Rules that forbid what the target would say next, once its own words stand in a window."""
    engine = engine_of(target, "none")
    request = Request(
        index=0,
        id="0",
        sampling=SamplingParams(max_tokens=4),
        messages=[{"role": "user", "content": TEXT}],
    )
    engine.tokenize([request])
    prompt = list(request.tokens.token_ids)
    first, second, third, fourth = outputs(engine, [request])[0][0]
    sampling = SamplingParams(
        temperature=2.0,
        min_p=0.01,
        max_tokens=LENGTH,
        ignore_eos=True,
        presence_penalty=-0.4,
        frequency_penalty=0.6,
        repetition_penalty=1.1,
        logit_bias=((first, 1.0), (third, -0.5)),
        bad_words=((second, third), (third, fourth)),
    )
    return Sampled(prompt, sampling, exact(engine, prompt, sampling))


@cache
def banned(target: str) -> Sampled:
    """Rules that ban what a drafter is most certain of, at a temperature where it is certain."""
    known, engine = sampled(target), engine_of(target, "none")
    request = Request(
        index=0, id="0", sampling=SamplingParams(max_tokens=3), prompt_token_ids=known.prompt
    )
    _, second, third = outputs(engine, [request])[0][0]
    sampling = SamplingParams(
        temperature=1.0,
        min_p=0.01,
        max_tokens=LENGTH,
        ignore_eos=True,
        bad_words=((second,),),
        logit_bias=((third, -100.0),),
    )
    return Sampled(known.prompt, sampling, exact(engine, known.prompt, sampling))


def exact(
    engine: NativeEngine, prompt: list[int], sampling: SamplingParams
) -> dict[tuple[int, ...], float]:
    change = processors(sampling, len(prompt), [])

    def probs_after(prefix: list[int]) -> torch.Tensor:
        ids = [*prompt, *prefix]
        logits = torch.tensor(engine.next_token_logits(ids))[None].float()
        probs = (change(torch.tensor([ids]), logits)[0] / sampling.temperature).softmax(-1)
        kept = probs.masked_fill(probs < sampling.min_p * probs.max(), 0)
        return kept / kept.sum()

    return exact_cells(probs_after, LENGTH, MOST_LIKELY)


def p_of_outputs(
    target: str, method: str, *typed: str, known: Sampled | None = None
) -> tuple[float, int]:
    """P-value of the outputs with this drafter, and how many drafts were accepted."""
    known = known or sampled(target)
    requests = [
        Request(
            index=i,
            id=str(i),
            sampling=replace(known.sampling, seed=1000 + i),
            prompt_token_ids=known.prompt,
        )
        for i in range(NUM_REQUESTS)
    ]
    texts, num_accepted = outputs(
        engine_of(target, method, "engine.max_num_seqs=64", *typed), requests
    )
    return p_value(texts, known.cells, LENGTH), num_accepted


@pytest.mark.parametrize(
    ("method", "target"),
    slow_unless(lambda method, _: method in IN_EVERY_SUITE, DRAFTERS.items()),
)
def test_samples_under_rules_have_the_distribution_without_drafts(method: str, target: str) -> None:
    assert sum(sampled(target).cells.values()) == pytest.approx(1, abs=1e-5)
    p, num_accepted = p_of_outputs(target, method)
    assert p > ALPHA
    assert num_accepted > NUM_REQUESTS // 8 or method in ("ngram", "suffix")


@pytest.mark.gpu
@pytest.mark.parametrize(("method", "target"), DRAFTERS.items())
def test_a_device_gives_the_tokens_and_the_distribution_without_drafts(
    method: str, target: str
) -> None:
    """Greedy tokens of a CPU in float32; samples as above."""
    typed = ("engine.max_num_seqs=5", "engine.max_num_batched_tokens=64")
    on_cpu = engine_of(target, "none", *typed, "engine.device=cpu")
    on_device = engine_of(target, method, *typed, "engine.device=cuda")
    drafted, num_accepted = outputs(on_device, ruled_requests())
    assert drafted == outputs(on_cpu, ruled_requests())[0]
    assert num_accepted > 0
    p, _ = p_of_outputs(target, method, "engine.device=cuda")
    assert p > ALPHA


@pytest.mark.slow
@pytest.mark.parametrize("verification", ["standard", "block"])
def test_sampled_drafts_keep_the_distribution_under_rules(verification: str) -> None:
    """Drafts from the drafter's own distribution, which none of these rules changes, beside the
    ruled p."""
    typed = (PROBABILISTIC, f"method.verification={verification}")
    p, num_accepted = p_of_outputs("tiny_qwen3", "eagle3", *typed)
    assert p > ALPHA
    assert num_accepted > NUM_REQUESTS // 8


def test_drafts_drawn_without_banned_tokens_keep_the_distribution() -> None:
    p, num_accepted = p_of_outputs(
        "tiny_qwen3", "eagle3", PROBABILISTIC, known=banned("tiny_qwen3")
    )
    assert p > ALPHA
    assert num_accepted > NUM_REQUESTS // 8


@pytest.mark.slow
def test_probabilities_from_before_the_bans_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutation that the test above is for: the verifier is told what the drafter would have
    drawn from without bans."""
    true_draw = EagleSpeculator.draw_draft
    raw: list[torch.Tensor] = []

    def without_bans(logits: torch.Tensor, *rest: Any) -> torch.Tensor:
        raw[:] = [logits]
        return rules.without_bans(logits, *rest)

    def draw(self: EagleSpeculator, logits: torch.Tensor, *rest: Any) -> Any:
        return true_draw(self, logits, *rest)[0], true_draw(self, raw[0], *rest)[1]

    monkeypatch.setattr(draft_model, "without_bans", without_bans)
    monkeypatch.setattr(EagleSpeculator, "draw_draft", draw)
    p, _ = p_of_outputs("tiny_qwen3", "eagle3", PROBABILISTIC, known=banned("tiny_qwen3"))
    assert p < ALPHA


@pytest.mark.slow
def test_rules_that_forget_the_drafts_before_a_row_are_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The mutation that the test above is for: every row is constrained as the first one."""
    true_places = reference.row_places

    def places(*args: object) -> reference.RowPlaces:
        found = true_places(*args)  # type: ignore[arg-type]
        none, known = torch.zeros_like(found.num_drafts), found.num_known - found.num_drafts
        return reference.RowPlaces(found.request, found.slot, none, known)

    monkeypatch.setattr(reference, "row_places", places)
    p, _ = p_of_outputs("tiny_qwen3", "eagle3")
    assert p < ALPHA
