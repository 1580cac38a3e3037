"""Outputs under grammars: every one follows its grammar, and drafts change no token."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import count
from typing import Any

import numpy as np
import pytest
from drawn_grammars import Drawn, drawn_grammar
from drawn_schemas import is_valid
from graph_runs import (
    GRAPH_MODES,
    attention_as_on_devices,
    graph_config,
    make_graph_engine,
    no_waiting,
)
from grids import slow_unless
from recorded_graphs import RecordedOps
from thread_ranks import as_ranks
from zoo_engines import DRAFTERS, engine_of

from hydraspec.config.schema import Device, Dtype
from hydraspec.config.structured import as_structured
from hydraspec.engine.native import NativeEngine
from hydraspec.parallel.layout import Layout
from hydraspec.types import Completion, Request, SamplingParams, StepRecord, Structured

IN_EVERY_SUITE = ("gemma4_mtp", "eagle3", "ngram")
NUM_SCHEMAS = 500
TEXTS = (
    "Write job, name, city, color and id of this record as JSON.\nid: A7388; color: red; item: "
    "toys; city: Porto; name: Emma Weber; job: tailor",
    "Olga has 41 books and buys 9 bags of 6 books. How many books does Olga have now?",
    "Write a function sum_pens that goes over pens and sums them up in value.",
)
RECORD = {
    "type": "object",
    "properties": {
        "job": {"enum": ["tailor", "baker"]},
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 2},
    },
    "required": ["job", "name", "age", "tags"],
}
PHONE, NESTED = r"[0-9]{3}-[0-9]{4}", 'root ::= "(" root ")" | "x" [0-9]'
CHOICES = ["yes, of course", "no", 'a "quoted" Ä']
OTHERS = (
    {"regex": PHONE},
    {"grammar": NESTED},
    {"choice": CHOICES},
    {"json": RECORD},
    {},  # no grammar
)


@pytest.fixture(scope="module", autouse=True)
def _closed() -> Iterator[None]:
    yield
    engine_of.cache_clear()


def requests(
    grammars: list[Structured | None], *, longest: int = 200, **sampling: Any
) -> list[Request]:
    return [
        Request(
            index=i,
            id=str(i),
            sampling=SamplingParams(
                max_tokens=longest if structured else 20, structured=structured, seed=i, **sampling
            ),
            messages=[{"role": "user", "content": TEXTS[i % len(TEXTS)]}],
        )
        for i, structured in enumerate(grammars)
    ]


def drawn(number: int, first_seed: int = 0) -> list[Drawn]:
    return [drawn_grammar(random.Random(first_seed + i)) for i in range(number)]


@cache
def different() -> list[Drawn]:
    """NUM_SCHEMAS JSON schemas, then the grammars of other kinds among them; no two are alike."""
    schemas, rest, seeds = dict[Structured, Drawn](), dict[Structured, Drawn](), count()
    while len(schemas) < NUM_SCHEMAS:
        found = drawn_grammar(random.Random(next(seeds)))
        (schemas if found.structured.kind == "json" else rest)[found.structured] = found
    return [*schemas.values(), *rest.values()]


def others() -> list[Structured | None]:
    return [as_structured(each) for each in OTHERS] * 3


def completions(
    engine: NativeEngine, asked: list[Request]
) -> tuple[dict[int, Completion], list[StepRecord]]:
    engine.tokenize(asked)
    found, records = {}, []
    for event in engine.run(asked, concurrency=None):
        if isinstance(event, Completion):
            assert event.error is None
            found[event.index] = event
        else:
            assert isinstance(event, StepRecord)
            records.append(event)
    return found, records


def tokens(found: dict[int, Completion]) -> list[list[int]]:
    return [found[index].output_token_ids for index in sorted(found)]


def check(
    asked: list[Request], found: dict[int, Completion], random_ones: Sequence[Drawn] = ()
) -> int:
    """Each text follows its grammar; returns how many ended by themselves."""
    num_ended, follows = 0, {each.structured: each.follows for each in random_ones}
    for request in asked:
        structured, completion = request.sampling.structured, found[request.index]
        if structured is None or completion.finish_reason == "length":
            continue
        num_ended += 1
        text = completion.text
        assert text is not None
        if structured in follows:
            assert follows[structured](text), (structured, text)
        elif structured.kind == "json":
            assert is_valid(json.loads(text), json.loads(structured.text)), text
        elif structured.kind == "regex":
            assert re.fullmatch(structured.text, text)
        elif structured.kind == "choice":
            assert text in json.loads(structured.text)
        else:
            depth = text.count("(")
            assert re.fullmatch(rf"\({{{depth}}}x[0-9]\){{{depth}}}", text)
    return num_ended


@pytest.mark.parametrize(
    ("method", "is_quick"),
    [
        *((method, True) for method in IN_EVERY_SUITE),
        *(pytest.param(method, False, marks=pytest.mark.slow) for method in DRAFTERS),
    ],
)
def test_greedy_outputs_follow_grammars_and_are_those_without_drafts(
    method: str, is_quick: bool
) -> None:
    """More requests than slots, so that slots change owners, with a grammar and without. Fails if
    a mask is that of another draft, outlives its step, or lets a rejected draft advance it. In the
    slow cases each drafter has a tenth of NUM_SCHEMAS schemas, and no output is cut."""
    drafter = list(DRAFTERS).index(method)
    random_ones = drawn(10, 50 * drafter) if is_quick else different()[drafter :: len(DRAFTERS)]
    target, typed = DRAFTERS[method], ("engine.max_num_seqs=5", "engine.max_num_batched_tokens=96")
    asked = requests(
        [*(each.structured for each in random_ones), *others()], longest=120 if is_quick else 200
    )
    plain, _ = completions(engine_of(target, "none", *typed), asked)
    drafted, records = completions(engine_of(target, method, *typed), asked)
    assert tokens(drafted) == tokens(plain)
    assert check(asked, drafted, random_ones) >= len(random_ones)
    assert {drafted[index].finish_reason for index in range(len(random_ones))} == {"stop"}
    free = [request for request in asked if request.sampling.structured is None]
    alone, _ = completions(engine_of(target, "none", *typed), free)
    assert {i: each.output_token_ids for i, each in alone.items()} == {
        request.index: drafted[request.index].output_token_ids for request in free
    }
    assert sum(r.num_accepted for record in records for r in record.requests) > 0


def test_samples_follow_grammars_at_every_rule_of_verification() -> None:
    for rule in ("standard", "block"):
        random_ones = drawn(6)
        grammars = [each.structured for each in random_ones]
        asked = requests([*grammars, *others()], temperature=1.5)
        typed = (f"method.verification={rule}", "method.draft_sampling=probabilistic")
        found, _ = completions(engine_of("tiny_qwen3", "eagle3", *typed), asked)
        assert check(asked, found, random_ones) > 12


def test_logits_of_verdicts_are_under_the_grammar() -> None:
    """Each greedy token is the best one of `logits_under`, which verdicts look at."""
    engine = engine_of("tiny_qwen3", "none")
    asked = requests(others()[:3])
    found, _ = completions(engine, asked)
    for request in asked:
        prompt, output = request.tokens.token_ids, found[request.index].output_token_ids
        for place, token in enumerate(output):
            ids = [*prompt, *output[:place]]
            logits = engine.logits_under(request.sampling, ids, len(prompt))
            assert logits is not None
            assert int(logits.argmax()) == token
            assert np.isneginf(logits).sum() > 700


@pytest.fixture
def _static_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    attention_as_on_devices(monkeypatch)


@pytest.mark.usefixtures("_static_attention")
@pytest.mark.parametrize(
    ("method", "mode", "ahead"),
    slow_unless(
        lambda *case: case in (("eagle3", "full_and_piecewise", True), ("dflash", "full", False)),
        [
            (method, mode, ahead)
            for method in ("eagle3", "gemma4_mtp", "dflash", "none")
            for mode in ("none", "full_and_piecewise", "full", "full_decode_only", "piecewise")
            for ahead in (False, True)
        ],
    ),
)
def test_graphs_and_steps_ahead_change_nothing(method: str, mode: str, ahead: bool) -> None:
    """Masks are inputs of a graph: one that kept those of its capture, or a variant without masks
    that serves a step with them, would give other tokens."""
    asked = requests(others()[:5] * 2, longest=40)
    wanted, _ = completions(NativeEngine(graph_config(method, "none", max_model_len=112)), asked)
    config = graph_config(method, mode, max_model_len=112, sizes=(5,))
    config.engine.async_scheduling = ahead
    engine = make_graph_engine(config, None if mode == "none" else RecordedOps())
    engine.tokenize(asked)
    engine.prepare(asked)
    found, _ = completions(engine, asked)
    assert tokens(found) == tokens(wanted)
    check(asked, found)


@pytest.mark.gpu
@pytest.mark.timeout(240)
@pytest.mark.parametrize("mode", GRAPH_MODES)
@pytest.mark.parametrize("method", ["eagle3", "gemma4_mtp", "dflash", "none"])
def test_graphs_of_a_device_follow_the_masks_of_their_steps(method: str, mode: str) -> None:
    """Greedy requests in float32: the CPU's tokens; nothing waits for the device but for events."""
    asked = requests(others()[:5] * 2, longest=40)
    wanted, _ = completions(NativeEngine(graph_config(method, "none", max_model_len=256)), asked)
    config = graph_config(method, mode, device=Device.cuda, dtype=Dtype.float32, max_model_len=256)
    engine = make_graph_engine(config, None)
    engine.tokenize(asked)
    engine.prepare(asked)
    completions(engine, asked)
    with no_waiting():
        found, records = completions(engine, asked)
    assert tokens(found) == tokens(wanted)
    check(asked, found)
    jumped = [place for r in records for part in r.requests for place in part.jump_forward_places]
    assert bool(jumped) == (method != "none")


def test_ranks_and_preempted_requests_give_what_one_process_gives() -> None:
    asked = requests(others()[:5], longest=40)
    config = graph_config("eagle3", "none", max_model_len=256)
    wanted, _ = completions(NativeEngine(config), asked)
    for found in as_ranks(Layout(tensor=2), lambda r: completions(NativeEngine(config), asked)[0]):
        assert tokens(found) == tokens(wanted)
    config.engine.kv_cache.memory_gib, config.engine.prefix_caching = 0.0032, False
    found, records = completions(NativeEngine(config), asked)
    assert sum(record.num_preempted for record in records) > 0
    assert tokens(found) == tokens(wanted)


def test_a_step_with_a_grammar_is_awaited_and_others_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Steps ahead: fails if masks are made of drafts that the host does not know yet, or if every
    run waits."""
    overtaken: list[list[bool]] = []  # at each launch, of the steps in flight: is there a grammar
    flight_of = NativeEngine._flight

    def noted(self: NativeEngine, *args: Any) -> Any:
        overtaken.append(
            [
                any(i.samples and i.sequence.grammar is not None for i in flight.scheduled)
                for flight in self._in_flight
            ]
        )
        return flight_of(self, *args)

    monkeypatch.setattr(NativeEngine, "_flight", noted)
    engine = engine_of("tiny_qwen3", "eagle3", "engine.async_scheduling=true")
    for grammars in ([None] * 3, [as_structured({"regex": PHONE}), None]):
        overtaken.clear()
        completions(engine, requests(grammars))
        assert max(map(len, overtaken)) == 1
        assert not any(map(any, overtaken))


def test_tokens_without_text_are_allowed_at_the_end_alone() -> None:
    """A string that holds one would show fewer characters than the schema counts."""
    engine = engine_of("tiny_qwen3", "none")
    assert engine.parts.tokenizer is not None
    special = engine.parts.tokenizer.special_token_ids
    ends = set(engine.parts.target.eos_token_ids)
    assert special > ends
    (asked,) = requests([as_structured({"json": {"type": "string", "maxLength": 3}})])
    prompt = engine.parts.tokenizer.encode("Who?")
    for text, allowed in (("", set()), ('"', set()), ('"a', set()), ('"a"', ends)):
        ids = [*prompt, *(engine.parts.tokenizer.encode(text) if text else [])]
        found = engine.allowed_tokens(asked.sampling, ids, len(prompt))
        assert found is not None
        assert found.any()
        assert {token for token in special if found[token]} == allowed


def test_a_grammar_without_a_next_token_ends_its_request_with_an_error() -> None:
    """Greedy, with and without drafts: the tokens before the dead end are kept."""
    found = []
    for method in ("none", "eagle3"):
        engine = engine_of("tiny_qwen3", method)
        asked = requests([Structured("grammar", 'root ::= "ab" dead\ndead ::= [\\x00]')])
        engine.tokenize(asked)
        grammar = engine._grammars.of(asked[0])
        assert grammar is not None
        (end,) = (e for e in engine.run(asked, concurrency=None) if isinstance(e, Completion))
        found.append((end.output_token_ids, end.finish_reason, end.error))
    assert found[0] == found[1]
