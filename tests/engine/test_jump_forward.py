"""Drafts that a grammar decides in the drafter's place (docs/adr/0051): sampled outputs keep their
distribution, greedy ones their tokens (test_grammars), and they are counted apart.

Power: a total variation distance of 0.15 has a noncentrality of at least 4 n 0.15^2 = 108 at n =
1,200, which a chi-squared test with the 7 to 15 degrees of freedom here at alpha 1e-4 finds with
probability above 0.99.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from sampled_cells import exact_cells, p_value
from zoo_engines import DRAFTERS, engine_of

import hydraspec
from hydraspec.engine.native import NativeEngine
from hydraspec.metrics.meter import Meter
from hydraspec.sampling import rules
from hydraspec.types import Completion, Request, SamplingParams, StepRecord, Structured

ALPHA, NUM_REQUESTS, LENGTH, MOST_LIKELY = 1e-4, 1_200, 4, 3
PROMPT = "Who sat where?"
# Texts that begin alike, whose tokens are not decided: how they are cut is the target's choice.
GRAMMAR = 'root ::= "{\\"name" ("\\": 7" | "s\\": [" | "less") "}" [a-c]'
SAMPLING = SamplingParams(
    temperature=2.0, max_tokens=LENGTH, structured=Structured("grammar", GRAMMAR)
)
EVERY_DRAFT_IS_SAMPLED = "method.draft_sampling=probabilistic"


ON_DEVICE = ("engine.device=cuda", EVERY_DRAFT_IS_SAMPLED)


@pytest.fixture(scope="module", autouse=True)
def _closed() -> Iterator[None]:
    yield
    engine_of.cache_clear()


def requests(engine: NativeEngine, count: int, sampling: SamplingParams) -> list[Request]:
    asked = [
        Request(index=i, id=str(i), prompt=PROMPT, sampling=replace(sampling, seed=1_000 + i))
        for i in range(count)
    ]
    engine.tokenize(asked)
    return asked


def p_of_outputs(target: str, method: str, *typed: str) -> tuple[float, int]:
    """P-value of the outputs with this drafter, and how many decided drafts were accepted."""
    engine = engine_of(target, method, "engine.max_num_seqs=200", *typed)
    asked = requests(engine, NUM_REQUESTS, SAMPLING)
    prompt = list(asked[0].tokens.token_ids)

    def probs_after(prefix: list[int]) -> torch.Tensor:
        logits = engine.logits_under(SAMPLING, [*prompt, *prefix], len(prompt))
        return (torch.tensor(logits).double() / SAMPLING.temperature).softmax(-1)

    cells = exact_cells(probs_after, LENGTH, MOST_LIKELY)
    assert sum(cells.values()) == pytest.approx(1, abs=1e-5)
    texts, num_jumped = [], 0
    for event in engine.run(asked, concurrency=None):
        if isinstance(event, Completion):
            assert event.error is None
            texts.append(event.output_token_ids)
        elif isinstance(event, StepRecord):
            for each in event.requests:
                num_jumped += sum(p < each.num_accepted for p in each.jump_forward_places)
    return p_value(texts, cells, LENGTH), num_jumped


@pytest.mark.parametrize(
    ("method", "typed"),
    [
        ("eagle3", (EVERY_DRAFT_IS_SAMPLED,)),
        pytest.param(
            *("eagle3", (EVERY_DRAFT_IS_SAMPLED, "method.verification=block")),
            marks=pytest.mark.slow,
        ),
        pytest.param("eagle3", (), marks=pytest.mark.slow),
        *(
            pytest.param(
                "eagle3", (*ON_DEVICE, f"method.verification={rule}"), marks=pytest.mark.gpu
            )
            for rule in ("standard", "block")
        ),
        *(
            pytest.param(method, (), marks=pytest.mark.slow)
            for method in DRAFTERS
            if method != "eagle3"
        ),
    ],
)
def test_samples_have_the_distribution_of_the_target_under_the_grammar(
    method: str, typed: tuple[str, ...]
) -> None:
    p, num_jumped = p_of_outputs(DRAFTERS[method], method, *typed)
    assert p > ALPHA
    assert num_jumped > NUM_REQUESTS // 4


@pytest.mark.slow
@pytest.mark.parametrize("verification", ["standard", "block"])
def test_drafts_that_pass_for_sampled_ones_are_found(
    verification: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The mutation that the test above is for."""
    monkeypatch.setattr(rules, "_make_certain", lambda *_: None)
    p, _ = p_of_outputs(
        "tiny_qwen3", "eagle3", EVERY_DRAFT_IS_SAMPLED, f"method.verification={verification}"
    )
    assert p < ALPHA


@pytest.mark.parametrize(
    ("vocab_map", "row"), [(None, [0, 0, 0, 0, 1, 0]), ([7, 4, 0, 9, 1, 2], [0, 1, 0, 0, 0, 0])]
)
def test_a_decided_draft_is_certain_in_the_vocabulary_of_the_drafter(
    vocab_map: list[int] | None, row: list[int]
) -> None:
    """One that the vocabulary lacks has no mass: it is never accepted."""
    probs = torch.full((2, 2, 6), 1 / 6)
    known = None if vocab_map is None else torch.tensor(vocab_map)
    rules._make_certain(probs, known, torch.tensor([1, 2]), torch.tensor([4, 5]))
    assert probs[0, 1].tolist() == row
    assert probs[1, 0].sum() == (1 if vocab_map is None else 0)
    assert torch.equal(probs[[0, 1], [0, 1]], torch.full((2, 6), 1 / 6))


def test_decided_drafts_are_counted_apart() -> None:
    """Every token of a decode step is a drafter's, a decided one, or the step's own."""
    engine = engine_of("tiny_qwen3", "eagle3")
    schema = '{"type": "object", "properties": {"name": {"enum": ["Porto", "Lima"]}}}'
    sampling = SamplingParams(max_tokens=64, structured=Structured("json", schema))
    asked = requests(engine, 4, sampling)
    meter = Meter(asked, num_speculative_tokens=engine.info.num_speculative_tokens)
    num_verified = num_decided = 0
    for event in engine.run(asked, concurrency=None):
        if isinstance(event, Completion):
            meter.add_completion(event)
        else:
            assert isinstance(event, StepRecord)
            meter.add_step(event)
            num_verified += sum(len(each.draft_token_ids) for each in event.requests)
            num_decided += sum(len(each.jump_forward_places) for each in event.requests)
    assert 0 < meter.num_jump_forward_tokens() <= num_decided
    assert meter.num_draft_tokens() == num_verified - num_decided
    decoding = [each for each in meter.completed if each.decode_steps]
    for each in decoding:
        emitted = each.decode_steps + each.num_accepted_tokens + each.num_jump_forward_tokens
        assert emitted >= each.decode_tokens  # an end cuts the last step
        assert emitted - each.decode_tokens <= engine.info.num_speculative_tokens
    assert decoding


def test_processed_log_probabilities_are_those_under_the_grammar() -> None:
    """Of decided and other tokens, by logits that the engine computes without drafts."""
    engine = engine_of("tiny_qwen3", "eagle3", "sampling.logprobs_mode=processed")
    sampling = replace(SAMPLING, temperature=0.0, max_tokens=32, logprobs=20)
    (asked,) = requests(engine, 1, sampling)
    (ended,) = (e for e in engine.run([asked], concurrency=None) if isinstance(e, Completion))
    prompt, output = ended.prompt_token_ids, ended.output_token_ids
    assert ended.logprobs is not None
    assert len(ended.logprobs) == len(output) > LENGTH
    for place, found in enumerate(ended.logprobs):
        logits = engine.logits_under(sampling, [*prompt, *output[:place]], len(prompt))
        expected = torch.tensor(logits).double().log_softmax(-1)
        assert found.logprob == pytest.approx(float(expected[output[place]]), abs=1e-4)
        num_allowed = int(expected.isfinite().sum())
        assert len(found.top) == min(20, num_allowed)
        best = expected.topk(len(found.top)).values.tolist()
        assert [value for _, value in found.top] == pytest.approx(best, abs=1e-4)


def test_a_run_says_what_its_grammar_cost_and_decided(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = ["target=tiny_qwen3", "method=eagle3", "workload.limit=4", "tracker=none"]
    typed += ["sampling.structured.regex='id: [0-9]{2} \\(new\\)'", "metrics.trace=true"]
    summary = hydraspec.run([*typed, f"hydra.run.dir={tmp_path}"])
    assert summary["grammars"]["num_grammars"] == 1
    assert summary["grammars"]["compile_ms"] > 0
    assert summary["num_jump_forward_tokens"] > 0
    assert summary["lossless"]["verdict"] == "identical"
    trace = [json.loads(line) for line in (tmp_path / "trace.jsonl").read_text().splitlines()]
    assert summary["num_jump_forward_tokens"] == sum(
        place < line["num_accepted"] for line in trace for place in line["jump_forward_places"]
    )
    console = capsys.readouterr().out
    assert "compiling grammars, ms" in console
    assert "jump-forward tokens" in console
