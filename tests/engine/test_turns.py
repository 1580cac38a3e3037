"""Conversations: a turn is sent once the answer before it is there, and its prompt extends that
turn's tokens and answer exactly, in every engine and over replicas."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import records
from fake_engine import make_info
from many_ranks import over_ranks
from tiny_targets import assistant_config, gemma4_config, run_config, write_folder

from hydraspec.engine.base import Engine
from hydraspec.engine.native import NativeEngine
from hydraspec.engine.prompts import ANSWER, tokenize
from hydraspec.engine.schedule.admission import Pending
from hydraspec.engine.turns import Conversations, followed_prompt
from hydraspec.models.checkpoint.reader import resolve_folder
from hydraspec.models.tokenizer import Tokenizer, load_tokenizer
from hydraspec.parallel.layout import Layout
from hydraspec.types import (
    Completion,
    Prompt,
    Request,
    Span,
    StepRecord,
    WorkloadError,
)

NEW_TOKENS = 9  # of a turn
ENDED = Completion(
    index=0,
    prompt_token_ids=[],
    output_token_ids=[],
    text=None,
    finish_reason="stop",
    error=None,
    ttft_ms=1.0,
    latency_ms=1.0,
)


def conversations(*lengths: int, max_tokens: int = 5, **sampling: Any) -> list[Request]:
    """Conversations of so many turns each, of token ids; the answers end at their length."""
    rng = random.Random(5)
    requests: list[Request] = []
    for number, length in enumerate(lengths):
        for turn in range(1, length + 1):
            index = len(requests)
            requests.append(
                records.request(
                    index,
                    prompt_token_ids=[rng.randrange(6, 60) for _ in range(NEW_TOKENS)],
                    id=f"c{number}/{turn}",
                    after=index - 1 if turn > 1 else None,
                    turn=turn,
                    max_tokens=max_tokens + index % 3,
                    seed=index,
                    ignore_eos=True,
                    **sampling,
                )
            )
    return requests


def decode(
    engine: Engine, requests: list[Request], concurrency: int | None = None
) -> dict[int, Completion]:
    """The completions; a turn's prompt extends what it follows, and no turn was early."""
    engine.tokenize(requests)
    done: dict[int, Completion] = {}
    for event in engine.run(requests, concurrency=concurrency):
        if isinstance(event, StepRecord):
            for part in event.requests:
                after = requests[part.index].after
                assert after is None or after in done, "a turn ran before the answer to wait for"
            continue
        done[event.index] = event
    assert sorted(done) == [r.index for r in requests]
    for request in requests:
        assert request.prompt_token_ids is not None
        before = (
            []
            if request.after is None
            else [*done[request.after].prompt_token_ids, *done[request.after].output_token_ids]
        )
        if done[request.index].error is None:
            assert done[request.index].prompt_token_ids == [*before, *request.prompt_token_ids]
    return done


def outputs(done: dict[int, Completion]) -> dict[int, tuple[list[int], list[int]]]:
    return {i: (c.prompt_token_ids, c.output_token_ids) for i, c in sorted(done.items())}


# ------------------------------------------------------------------ who joins when


@pytest.mark.parametrize("concurrency", [1, 3, None])
def test_every_turn_joins_in_order_and_a_conversation_counts_as_one(
    concurrency: int | None,
) -> None:
    """In whatever order requests end; turns of two conversations may stand mixed in the list."""
    rng = random.Random(concurrency)
    for _ in range(200):
        requests = conversations(*(rng.randrange(1, 5) for _ in range(rng.randrange(1, 7))))
        pending, limit = Pending(sorted(requests, key=lambda r: r.turn), concurrency), concurrency
        running: list[Request] = []
        ended: set[int] = set()
        while (joining := pending.joining(len(running))) is not None:
            assert joining or running, "nothing can ever join"
            assert all(r.after is None or r.after in ended for r in joining)
            running += joining
            assert len(running) <= (limit or len(requests))
            for request in rng.sample(running, rng.randrange(1, len(running) + 1)):
                running.remove(request)
                ended.add(request.index)
                pending.ended(request.index)
        assert ended == {r.index for r in requests}


def test_a_conversation_keeps_its_place_before_the_next_one_begins() -> None:
    requests = conversations(2, 1)
    pending = Pending(requests, 1)
    assert pending.joining(0) == [requests[0]]
    pending.ended(0)
    assert pending.joining(0) == [requests[1]]


def test_turns_that_cannot_be_are_refused() -> None:
    requests = conversations(2, 1)
    with pytest.raises(ValueError, match="a request of the same run"):
        Conversations(requests[1:])
    with pytest.raises(ValueError, match=r"same Request\.after"):
        Conversations([*requests, replace(requests[1], index=7)])


def test_a_stop_token_that_the_turn_begins_with_is_there_once() -> None:
    before = replace(ENDED, prompt_token_ids=[1, 2], output_token_ids=[3, 4])
    assert followed_prompt(before, Prompt([4, 5])) == Prompt([1, 2, 3, 4, 5])
    assert followed_prompt(before, Prompt([5, 4])) == Prompt([1, 2, 3, 4, 5, 4])
    for cut in (replace(before, finish_reason="length"), replace(before, ended_by_token=False)):
        assert followed_prompt(cut, Prompt([4, 5])) == Prompt([1, 2, 3, 4, 4, 5])


def test_the_spans_of_a_turn_follow_those_of_the_turns_before() -> None:
    image = Span(kind="image", start=1, length=1, digest="aa", may_be_cut=False)
    before = replace(ENDED, prompt_token_ids=[1, 2], output_token_ids=[3, 4], spans=(image,))
    found = followed_prompt(before, Prompt([4, 5, 6], (replace(image, start=2),)))
    assert found == Prompt([1, 2, 3, 4, 5, 6], (image, replace(image, start=5)))
    found = followed_prompt(before, Prompt([4, 5], (replace(image, start=0),)))
    assert found == Prompt([1, 2, 3, 4, 4, 5], (image, replace(image, start=4)))


# ------------------------------------------------------------------ engines


@pytest.fixture(scope="module")
def method(tmp_path_factory: pytest.TempPathFactory) -> NativeEngine:
    """A tiny target with an assistant, in float64."""
    folder, target = tmp_path_factory.mktemp("turns"), gemma4_config(tie_word_embeddings=False)
    config = run_config(
        write_folder(folder / "target", target),
        method="gemma4_mtp",
        drafter=write_folder(folder / "assistant", assistant_config(target)),
        max_model_len=128,
        max_num_seqs=3,
        max_num_batched_tokens=24,
    )
    return NativeEngine(config)


@pytest.mark.parametrize("concurrency", [1, 2, None])
def test_turns_decode_as_their_whole_prompts_would_alone(
    method: NativeEngine, concurrency: int | None
) -> None:
    """And greedy outputs of method and baseline are equal in every turn (float64)."""
    done = decode(method, conversations(3, 1, 2), concurrency)
    assert outputs(decode(method.baseline(), conversations(3, 1, 2), concurrency)) == outputs(done)
    alone = [
        replace(r, after=None, prompt_token_ids=done[r.index].prompt_token_ids)
        for r in conversations(3, 1, 2)
    ]
    assert {i: c.output_token_ids for i, c in decode(method, alone).items()} == {
        i: c.output_token_ids for i, c in done.items()
    }


def test_a_turns_wait_begins_when_the_answer_before_it_ended(method: NativeEngine) -> None:
    requests = conversations(3, max_tokens=30)
    done = decode(method, requests)
    assert done[2].ttft_ms is not None
    assert done[2].ttft_ms < done[1].latency_ms, "counted from the begin of the conversation"


def test_after_an_error_the_later_turns_fail_and_say_why(method: NativeEngine) -> None:
    requests = conversations(4, 2)
    requests[1].prompt_token_ids = [7] * 200  # max_model_len is 128
    requests[2].prompt_token_ids = [8] * 200
    done = decode(method, requests, concurrency=1)
    assert [done[i].finish_reason for i in range(6)] == ["length", *["error"] * 3, *["length"] * 2]
    for later in (2, 3):
        error = str(done[later].error)
        assert "not sent, as an earlier turn of its conversation failed: c0/2 ended with" in error
        assert "target.max_model_len is 128" in error
        assert error.count("not sent") == 1


def test_after_a_cancelled_turn_the_later_ones_are_not_sent(method: NativeEngine) -> None:
    requests = conversations(3, 1)
    method.tokenize(requests)
    events = method.run(requests, concurrency=None)
    done: dict[int, Completion] = {}
    for event in events:
        if isinstance(event, Completion):
            done[event.index] = event
            if event.index == 0:
                method.cancel(1)
    assert [done[i].finish_reason for i in range(4)] == ["length", "error", "error", "length"]
    assert done[1].error == "cancelled"
    assert str(done[2].error).endswith("c0/2 ended with an error: cancelled")


def test_turns_join_a_step_late_where_the_host_runs_ahead(method: NativeEngine) -> None:
    config = replace(method.parts.config)
    config.engine = replace(config.engine, async_scheduling=True)
    ahead = NativeEngine(config)
    found = outputs(decode(ahead, conversations(3, 1, 2), 2))
    assert found == outputs(decode(method, conversations(3, 1, 2)))


@pytest.mark.parametrize(
    ("layout", "concurrency"),
    [
        (Layout(data=2), None),
        (Layout(data=2), 1),
        pytest.param(Layout(tensor=2, data=2), 3, marks=pytest.mark.slow),
    ],
    ids=["dp2-all", "dp2-1", "tp2_dp2-3"],
)
def test_a_conversation_stays_with_its_replica(
    method: NativeEngine, layout: Layout, concurrency: int | None
) -> None:
    served: dict[str, set[int]] = {}

    def lab(engine: Engine) -> dict[int, tuple[list[int], list[int]]]:
        requests = conversations(3, 1, 2, 3)
        engine.tokenize(requests)
        done: dict[int, Completion] = {}
        for event in engine.run(requests, concurrency=concurrency):
            if isinstance(event, Completion):
                done[event.index] = event
                continue
            for step in event.requests:
                conversation = requests[step.index].id.split("/")[0]
                served.setdefault(conversation, set()).add(event.replica)
        return outputs(done)

    wanted = outputs(decode(method, conversations(3, 1, 2, 3)))
    assert over_ranks(layout, method.parts.config, lab) == wanted
    assert all(len(replicas) == 1 for replicas in served.values())
    assert len(served) == 4


def test_over_replicas_an_error_ends_its_conversation_only(method: NativeEngine) -> None:
    def lab(engine: Engine) -> dict[int, str]:
        requests = conversations(3, 2, 2)
        requests[1].prompt_token_ids = [7] * 200
        return {i: c.finish_reason for i, c in decode(engine, requests, 2).items()}

    found = over_ranks(Layout(data=2), method.parts.config, lab)
    assert [found[i] for i in range(7)] == ["length", "error", "error", *["length"] * 4]


# ------------------------------------------------------------------ chat templates


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = load_tokenizer(resolve_folder("zoo:tiny_gemma4"))
    assert found is not None
    return found


def chat(*contents: str) -> list[dict[str, str]]:
    """Messages of user and assistant in turn."""
    roles = ("user", "assistant")
    return [{"role": roles[i % 2], "content": c} for i, c in enumerate(contents)]


def test_turns_of_text_are_what_the_template_writes_after_the_answer(tokenizer: Tokenizer) -> None:
    """The whole prompt is what the template makes of the conversation, where the answer's text
    gives the same tokens again; the stop token that the template writes too is there once."""
    texts, answers = ["Sort these words: b a", "And d c", "Now e"], ["a b", "c d", "e"]
    requests = [
        records.request(i, messages=chat(text), after=i - 1 if i else None, turn=i + 1)
        for i, text in enumerate(texts)
    ]
    tokenize(requests, tokenizer, make_info(vocab_size=768), "zoo:tiny_gemma4")
    prompt, said = requests[0].prompt_token_ids or [], texts[:1]
    assert prompt == tokenizer.encode_chat(chat(*said))
    for answer, request, text in zip(answers, requests[1:], texts[1:], strict=False):
        (stop, *_) = request.prompt_token_ids or []
        emitted = [*tokenizer.encode(answer), stop]
        before = replace(ENDED, prompt_token_ids=prompt, output_token_ids=emitted)
        prompt = list(followed_prompt(before, request.tokens).token_ids)
        assert prompt[: len(before.prompt_token_ids) + len(emitted)] == [
            *before.prompt_token_ids,
            *emitted,
        ]
        said += [answer, text]
        assert prompt == tokenizer.encode_chat(chat(*said))


def test_a_template_that_hides_answers_is_refused() -> None:
    class Inner:
        chat_template = "{{ messages[-1]['content'] }} 'user' 'assistant'"

        def apply_chat_template(self, messages: list[dict[str, str]], **how: object) -> str:
            return messages[-1]["content"]

        def encode(self, text: str, **how: object) -> list[int]:
            return [ord(c) for c in text]

    hiding = Tokenizer(Inner())
    answer = ANSWER.format(1)
    with pytest.raises(WorkloadError, match="turns: the chat template does not write an earlier"):
        hiding.encode_chat(chat("a", answer, "b"), after=answer)


# ------------------------------------------------------------------ other engines


def test_vllm_sends_a_turn_after_the_answer(start: Callable[..., Engine]) -> None:
    engine = start("none")
    done = decode(engine, conversations(3, 1, 2), 2)
    assert outputs(decode(engine, conversations(3, 1, 2))) == outputs(done)


def test_transformers_sends_a_turn_after_the_answer(method: NativeEngine) -> None:
    from hydraspec.adapters.transformers.engine import TransformersEngine

    config = replace(method.parts.config)
    config.target = replace(config.target, dtype=type(config.target.dtype)("float32"))
    config.method = replace(config.method, name="none", num_speculative_tokens=0)
    engine = TransformersEngine(config)
    done = decode(engine, conversations(3, 1, 2), 2)
    assert {i: len(c.output_token_ids) for i, c in done.items()} == {
        r.index: r.sampling.max_tokens for r in conversations(3, 1, 2)
    }
