"""Rules in the other engines, samples of a prompt, and what a run writes about both."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from records import request

import hydraspec
from hydraspec import factory
from hydraspec.adapters.transformers.rules import processors
from hydraspec.cli.compose import plan
from hydraspec.engine.base import Engine
from hydraspec.types import Completion, Request, SamplingParams, WorkloadError

PROMPTS = ([5, 6, 7, 5, 6, 7, 5, 6], [9, 9, 10, 11, 9, 9] * 3, [40, 41, 42])
RULES = (
    {},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5, "repetition_penalty": 1.2},
    {"logit_bias": ((36, 2.0),), "bad_words": ((6,), (9, 10)), "min_tokens": 12},
    {"repetition_penalty": 1.3, "temperature": 0.9, "top_k": 20, "min_p": 0.02, "seed": 5},
)


def engine_of(*typed: str) -> Engine:
    torch.set_num_threads(1)
    given = ["target=tiny_gemma4", "target.dtype=float32", "cudagraph=none", *typed]
    return factory.build_engine(plan(given).jobs[0].config)


def outputs(engine: Engine, asked: list[Request]) -> list[Completion]:
    engine.tokenize(asked)
    events = engine.run(asked, concurrency=None)
    found = {event.index: event for event in events if isinstance(event, Completion)}
    return [found[each.index] for each in asked]


def asked(*, greedy: bool = False) -> list[Request]:
    pairs = [(prompt, rules) for rules in RULES for prompt in PROMPTS]
    return [
        request(index, prompt_token_ids=list(prompt), max_tokens=16, **rules)
        for index, (prompt, rules) in enumerate(pairs)
        if not (greedy and "temperature" in rules)
    ]


@pytest.mark.parametrize(
    ("method", "greedy"), [("none", False), ("gemma4_mtp", True)], ids=["plain", "assisted"]
)
def test_transformers_says_what_the_native_engine_says(method: str, greedy: bool) -> None:
    """Padded batches and assisted generation; samples come from the same streams without drafts."""
    native = outputs(engine_of(f"method={method}"), asked(greedy=greedy))
    other = outputs(engine_of("engine=transformers", f"method={method}"), asked(greedy=greedy))
    assert [each.output_token_ids for each in other] == [each.output_token_ids for each in native]


@pytest.mark.parametrize("key", ["logprobs", "prompt_logprobs"])
def test_transformers_refuses_log_probabilities_of_a_line(key: str) -> None:
    engine = engine_of("engine=transformers", "method=none")
    with pytest.raises(WorkloadError, match=f"request 0: sampling.{key} is not available: engine="):
        engine.tokenize([request(0, prompt_token_ids=[5], **{key: 1})])


def test_logits_under_rules_are_those_of_the_processors() -> None:
    """What a verdict's margin is taken from, where two outputs differ."""
    engine = engine_of("method=none")
    sampling = SamplingParams(
        repetition_penalty=1.4, presence_penalty=0.3, bad_words=((7, 5),), min_tokens=4
    )
    text = [*PROMPTS[0], 7]
    eos = engine.info.eos_token_ids
    assert eos
    found = engine.logits_under(sampling, text, len(PROMPTS[0]))
    raw = torch.tensor(engine.next_token_logits(text))[None]
    expected = processors(sampling, len(PROMPTS[0]), eos)(torch.tensor([text]), raw)[0]
    np.testing.assert_allclose(found, expected, atol=1e-6)
    assert found is not None
    assert np.isneginf(found[[5, *eos]]).all()


def test_samples_of_a_prompt_share_its_prefix_and_differ(tmp_path: Path) -> None:
    """n samples are n requests: ids, seeds of their own, a prefix that is read once, min_p."""
    long = [5, 6, 7, 8, 9, 10] * 8
    lines = [
        {"id": "a", "prompt_token_ids": long, "sampling": {"n": 3}},
        {"id": "b", "prompt_token_ids": long[1:], "sampling": {"n": 2, "seed": 7}},
        {"id": "c", "prompt_token_ids": long[2:]},
    ]
    path = tmp_path / "lines.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    typed = ["sampling=stochastic", "sampling.temperature=3", "sampling.min_p=0.001", "seed=3"]
    typed += ["sampling.top_k=0", "sampling.top_p=1", "sampling.max_tokens=8", "tracker=none"]
    typed += ["workload=jsonl", f"workload.path={path}", "sampling.ignore_eos=true"]
    typed += ["method.draft_sampling=probabilistic", "baseline=false"]
    rows = [run_rows(tmp_path / f"{n}", typed) for n in range(2)]
    assert [row["id"] for row in rows[0]] == ["a#1", "a#2", "a#3", "b#1", "b#2", "c"]
    texts = [tuple(row["output_token_ids"]) for row in rows[0]]
    assert len({*texts}) == len(texts)
    assert [tuple(row["output_token_ids"]) for row in rows[1]] == texts
    cached = [row["num_cached_tokens"] for row in rows[0]]
    assert cached[1] == cached[2] > 0
    assert cached[4] > 0


def run_rows(folder: Path, typed: list[str]) -> list[dict[str, object]]:
    hydraspec.run([*typed, f"hydra.run.dir={folder}"])
    text = (folder / "requests.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_requests_jsonl_has_log_probabilities_where_asked_for(tmp_path: Path) -> None:
    lines = [
        {"prompt_token_ids": [5, 6, 7], "sampling": {"logprobs": 2, "prompt_logprobs": 1}},
        {"prompt_token_ids": [5, 6, 7]},
    ]
    path = tmp_path / "lines.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    typed = ["workload=jsonl", f"workload.path={path}", "sampling.max_tokens=5", "tracker=none"]
    asked, other = run_rows(tmp_path / "run", typed)
    assert not {"logprobs", "prompt_logprobs"} & other.keys()
    found, of_prompt = asked["logprobs"], asked["prompt_logprobs"]
    assert isinstance(found, list)
    assert isinstance(of_prompt, list)
    assert [each["token_id"] for each in found] == asked["output_token_ids"]
    for each in found:
        assert [len(pair) for pair in each["top"]] == [2, 2]
        assert each["top"][0] == [each["token_id"], each["logprob"]]  # greedy
    assert of_prompt[0] is None
    assert [each["token_id"] for each in of_prompt[1:]] == [6, 7]
