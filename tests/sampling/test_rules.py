"""Rules on logits against transformers' logits processors, at every draft of a window."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hydraspec_kernels.sampling.records import EVERYTHING, SamplingTensors
from hydraspec_kernels.sampling.rules import constrained, without_bans
from hydraspec_kernels.sampling.truncation.reference import target_probs
from transformers import MinPLogitsWarper, TemperatureLogitsWarper

from hydraspec.adapters.transformers.rules import processors
from hydraspec.sampling.flags import flags_of
from hydraspec.sampling.rules import MAX_DRAFT_BANS, RuleWriter, new_slot_rules
from hydraspec.types import SamplingParams

NUM_CASES = 500
VOCAB, K, EOS = 24, 4, 1
NO_IDS = torch.empty(1, 0, dtype=torch.long)


def drawn_rules(rng: np.random.Generator, text: list[int]) -> SamplingParams:
    """Each rule with probability a half; bad words are often such as the text completes."""

    def sometimes(value: Any, off: Any) -> Any:
        return value if rng.random() < 0.5 else off

    tokens = rng.permutation(VOCAB)
    words = []
    for _ in range(rng.integers(1, 4)):
        length, start = int(rng.integers(1, 5)), int(rng.integers(0, len(text)))
        words.append((*text[start : start + length - 1], int(rng.integers(0, VOCAB))))
    return SamplingParams(
        presence_penalty=sometimes(float(rng.uniform(-2, 2)), 0.0),
        frequency_penalty=sometimes(float(rng.uniform(-2, 2)), 0.0),
        repetition_penalty=sometimes(float(rng.uniform(0.5, 2)), 1.0),
        logit_bias=sometimes(tuple((int(t), float(rng.normal() * 5)) for t in tokens[:3]), ()),
        bad_words=sometimes(tuple(words), ()),
        min_tokens=sometimes(int(rng.integers(1, 12)), 0),
        stop_token_ids=sometimes((int(tokens[3]),), ()),
        ignore_eos=bool(rng.random() < 0.3),
    )


@pytest.fixture
def windows(make_step: Callable[..., Any]) -> Callable[..., Any]:
    """Steps of a few requests with texts and rules."""

    def build(rng: np.random.Generator, count: int) -> tuple[Any, list[Any]]:
        num_known = rng.integers(8, 24, count)
        texts = [rng.integers(0, VOCAB // 2, n + K).tolist() for n in num_known]
        num_prompts = [int(rng.integers(6, n + 1)) for n in num_known]
        drafts = torch.tensor([text[-K:] for text in texts])
        num_drafts = torch.from_numpy(rng.integers(0, K + 1, count))
        logits = torch.from_numpy(rng.normal(0, 3, (count, K + 1, VOCAB))).float()
        step = make_step(
            logits, drafts, num_drafts=num_drafts, num_computed=torch.tensor(num_known - 1)
        )
        num_slots = len(step.state.num_computed)
        state = replace(
            step.state,
            token_ids=torch.randint(0, VOCAB, (num_slots, 32)),
            rules=new_slot_rules(num_slots, K, VOCAB, torch.device("cpu")),
        )
        writer = RuleWriter(state.rules, (EOS,))
        settings = [drawn_rules(rng, text) for text in texts]
        for place, slot in enumerate(step.batch.slots.tolist()):
            writer.write(slot, drawn_rules(rng, texts[place]), 3)  # of an earlier owner
            writer.write(slot, settings[place], num_prompts[place])
            state.token_ids[slot, : num_known[place]] = torch.tensor(texts[place][:-K])
            state.token_ids[slot, num_known[place] :][:K] = drafts[place]
        cases = list(zip(texts, num_known, num_prompts, num_drafts.tolist(), settings, strict=True))
        return replace(step, state=state), cases

    return build


def test_rules_are_those_of_transformers_at_every_draft(windows: Callable[..., Any]) -> None:
    """500 random requests, float32; half of them sample, with min_p. Fails if a rule looks one
    token too far or too near, forgets the drafts before a row, counts prompt tokens as output, or
    outlives its slot's owner."""
    rng = np.random.default_rng(0)
    num_cases = num_changed = 0
    while num_cases < NUM_CASES:
        step, cases = windows(rng, 10)
        _, flags = flags_of(settings for *_, settings in cases)
        found = constrained(step.logits, step.batch, step.state, step.state.rules, flags)
        found = found.view(len(cases), K + 1, VOCAB)
        rows = step.logits.view_as(found)
        for place, (text, num_known, num_prompt, num_drafts, sampling) in enumerate(cases):
            change = processors(sampling, num_prompt, [EOS])
            for j in range(num_drafts + 1):
                ids = torch.tensor([text[: num_known + j]])
                expected = change(ids, rows[place, j : j + 1].clone())[0]
                torch.testing.assert_close(found[place, j], expected, rtol=1e-6, atol=2e-6)
                num_changed += not torch.equal(expected, rows[place, j])
                if place % 2:
                    check_min_p(found[place, j], expected, rng)
        num_cases += len(cases)
    assert num_changed > NUM_CASES


def check_min_p(row: torch.Tensor, expected: torch.Tensor, rng: np.random.Generator) -> None:
    """Probabilities of a row under rules are transformers' after temperature and min_p."""
    temperature, min_p = float(rng.uniform(0.3, 2)), float(rng.uniform(0, 0.5))
    warped = TemperatureLogitsWarper(temperature)(NO_IDS, expected[None])
    probs = MinPLogitsWarper(min_p)(NO_IDS, warped).softmax(-1)
    sampling = SamplingTensors(
        temperature=torch.tensor([temperature]),
        top_k=torch.zeros(1, dtype=torch.int64),
        top_p=torch.ones(1),
        min_p=torch.tensor([min_p]),
    )
    torch.testing.assert_close(target_probs(row[None], sampling), probs, rtol=1e-5, atol=1e-6)


def test_slots_without_rules_keep_their_logits(windows: Callable[..., Any]) -> None:
    """Bit for bit, beside requests with rules, also with flags that are true without need."""
    step, _ = windows(np.random.default_rng(1), 4)
    plain = new_slot_rules(len(step.state.num_computed), K, VOCAB, torch.device("cpu"))
    found = constrained(step.logits, step.batch, step.state, plain, EVERYTHING)
    assert torch.equal(found.nan_to_num(7.0), step.logits.nan_to_num(7.0))
    assert found.data_ptr() != step.logits.data_ptr()


@pytest.mark.parametrize("is_narrow", [False, True])
def test_drafts_lose_what_is_banned_whatever_comes_before(
    windows: Callable[..., Any], is_narrow: bool
) -> None:
    """Bad words of one token, biases of -100, and ends before the least length, and no others; the
    drafter's vocabulary may be narrower."""
    rng, num_banned = np.random.default_rng(3), 0
    for j in range(K + 1):
        step, cases = windows(rng, 10)
        writer, slots, rules = RuleWriter(step.state.rules, (EOS,)), step.batch.slots, []
        for slot, (_, _, num_prompt, _, given) in zip(slots.tolist(), cases, strict=True):
            biases = ((int(rng.integers(VOCAB)), -100.0), (int(rng.integers(VOCAB)), -99.0))
            rules.append(replace(given, logit_bias=biases))
            writer.write(slot, rules[-1], num_prompt)
        ids = torch.from_numpy(rng.permutation(VOCAB)[: VOCAB // 2]) if is_narrow else None
        tokens = list(range(VOCAB)) if ids is None else ids.tolist()
        logits = torch.randn(10, len(tokens), dtype=torch.bfloat16)
        known = torch.tensor([num_known + j for _, num_known, *_ in cases])
        found = without_bans(logits, slots, known, step.state.rules, ids)
        for row, changed, (_, num_known, num_prompt, _, _), rule in zip(
            logits.float(), found, cases, rules, strict=True
        ):
            banned = {word[0] for word in rule.bad_words if len(word) == 1}
            banned |= {rule.logit_bias[0][0]}
            if num_known + j < num_prompt + rule.min_tokens:
                banned |= {*rule.stop_token_ids, *(() if rule.ignore_eos else (EOS,))}
            is_banned = torch.tensor([token in banned for token in tokens])
            assert torch.equal(changed[~is_banned], row[~is_banned])
            assert (changed[is_banned] < -1e8).all()
            assert changed.isfinite().all()
            num_banned += int(is_banned.sum())
    assert num_banned > 20


def test_drafters_know_so_many_bans() -> None:
    vocab_size = 2 * MAX_DRAFT_BANS
    rules = new_slot_rules(2, K, vocab_size, torch.device("cpu"))
    biases = tuple((token, -100.0) for token in range(vocab_size))
    RuleWriter(rules, (EOS,)).write(0, SamplingParams(logit_bias=biases), 3)
    slots, known = torch.tensor([0, 1]), torch.tensor([5, 5])
    found = without_bans(torch.zeros(2, vocab_size), slots, known, rules, None)
    assert (found != 0).sum(1).tolist() == [MAX_DRAFT_BANS, 0]


@pytest.mark.gpu
def test_a_device_has_the_rules_of_the_cpu(windows: Callable[..., Any]) -> None:
    """Many rows of the same tokens, which a device adds up in any order."""
    rng = np.random.default_rng(2)
    for _ in range(10):
        step, _ = windows(rng, 16)
        there = step.to("cuda")
        expected = constrained(step.logits, step.batch, step.state, step.state.rules, EVERYTHING)
        found = constrained(there.logits, there.batch, there.state, there.state.rules, EVERYTHING)
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-6, atol=2e-6, equal_nan=True)
        known, plain = step.batch.seq_lens, step.logits[: len(step.batch.slots)]
        expected = without_bans(plain, step.batch.slots, known, step.state.rules, None)
        device = plain.cuda(), there.batch.slots, known.cuda(), there.state.rules, None
        found = without_bans(*device).cpu()  # poisoned rows stay NaN
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
