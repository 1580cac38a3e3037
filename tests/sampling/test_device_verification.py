"""Verification by kernels decides and emits what its reference does, request by request."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hydraspec_kernels.sampling import rejection
from hydraspec_kernels.sampling.rejection import Rule, launches
from hydraspec_kernels.sampling.token_choice import reference
from kernel_places import DEVICES
from torch import Tensor

from hydraspec.sampling.verifier import build_verifier
from hydraspec.types import SamplingFlags, Verdict

RULES = {"standard": Rule.STANDARD, "block": Rule.BLOCK, "synthetic": Rule.SYNTHETIC}
NO_TRUNCATION = SamplingFlags(any_top_k=False, any_top_p=False, any_min_p=False)
LENGTH = 1.7
# Each rule and each kind of draft is quick once; the interpreter is slow, and a device runs all.
RULES_AND_DRAFTS = [
    ("standard", "one_hot"),
    ("block", "probabilistic"),
    pytest.param("standard", "probabilistic", marks=pytest.mark.slow),
    pytest.param("block", "one_hot", marks=pytest.mark.slow),
    pytest.param("synthetic", "one_hot", marks=pytest.mark.slow),
    pytest.param("synthetic", "probabilistic", marks=pytest.mark.slow),
]


def steps(make_step: Any, num_drafts: int, vocab: int, seed: int, drafts: str, **given: Any) -> Any:
    """Requests of all temperatures with 0 to K drafts, some missing, some not sampling."""
    count = 9
    draw = torch.Generator().manual_seed(seed)
    logits = torch.randn(count, num_drafts + 1, vocab, generator=draw) * 2
    noise = torch.randn(count, num_drafts, vocab, generator=draw)
    probs = (logits[:, :num_drafts] + noise).softmax(-1)
    request = torch.arange(count)
    tokens = (
        torch.multinomial(
            probs.flatten(0, 1).clamp(min=1e-9) if num_drafts else torch.ones(1, 1),
            1,
            generator=draw,
        )
        .view(-1, 1)[: count * num_drafts]
        .view(count, num_drafts)
    )
    tokens[request % 7 == 3, num_drafts // 2 :] = -1
    greedy = request % 3 == 0
    best = logits[:, :num_drafts].argmax(-1)
    tokens = torch.where(greedy[:, None] & (request % 2 == 0)[:, None], best, tokens)
    return make_step(
        logits,
        tokens,
        draft_probs=probs if drafts == "probabilistic" else None,
        num_drafts=torch.randint(0, num_drafts + 1, (count,), generator=draw)
        if num_drafts > 1
        else None,
        samples=request % 8 != 5,
        temperature=torch.tensor([0.0, 0.6, 1.0])[request % 3],
        seed=torch.randint(-(2**62), 2**62, (count,), generator=draw),
        num_computed=torch.randint(0, 999, (count,), generator=draw),
        **given,
    )


def verified_by_kernels(
    step: Any, verification: str, device: str, is_truncated: bool = False
) -> Verdict:
    moved = step.to(device)
    return launches.verify_sampled_launches(
        moved.logits,
        moved.batch,
        moved.state,
        RULES[verification],
        LENGTH,
        is_truncated=is_truncated,
    )


def by_kernels(
    step: Any, verification: str, device: str, is_truncated: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    out = verified_by_kernels(step, verification, device, is_truncated)
    return out.tokens.cpu(), out.num_sampled.cpu(), out.num_rejected.cpu()


def by_torch(step: Any, verification: str, num_drafts: int) -> Verdict:
    length = LENGTH if verification == "synthetic" else None
    verify = build_verifier(verification, synthetic_acceptance_length=length)
    verdict: Verdict = step.verdict(verify, NO_TRUNCATION)
    return verdict


def assert_kernels_agree(
    step: Any, verification: str, num_drafts: int, device: str, is_truncated: bool = False
) -> Tensor:
    """Kernels give the verdict of the reference; returns its num_sampled."""
    wanted = by_torch(step, verification, num_drafts)
    tokens, num_sampled, num_rejected = by_kernels(step, verification, device, is_truncated)
    assert num_sampled.equal(wanted.num_sampled)
    assert num_rejected.equal(wanted.num_rejected)
    assert tokens.equal(wanted.tokens)
    return num_sampled


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("drafts", ["one_hot", "probabilistic"])
@pytest.mark.parametrize("num_drafts", [0, 1, 3])
@pytest.mark.parametrize("verification", RULES)
def test_verdicts_are_those_of_the_reference(
    verification: str, num_drafts: int, drafts: str, make_step: Any, device: str
) -> None:
    """Catches a draw under another key, a row too far, a ratio that is not capped, a residual of
    the wrong row; everything that must not be read is NaN."""
    if num_drafts == 0 and verification == "synthetic":
        pytest.skip("an acceptance length of 1 is all that fits")
    lengths = []
    for seed in range(2):
        step = steps(make_step, num_drafts, 11, seed, drafts)
        lengths += assert_kernels_agree(step, verification, num_drafts, device).tolist()
    assert len(set(lengths)) > min(num_drafts, 2)


@pytest.mark.parametrize("device", DEVICES)
def test_recorded_counts_are_accepted_as_the_reference_does(make_step: Any, device: str) -> None:
    """Of sampled and greedy requests together; a mean length plays no part."""
    step = steps(make_step, 3, 11, 0, "one_hot")
    draw = torch.Generator().manual_seed(1)
    accepts = torch.randint(0, 4, (2 * 9, 1100), generator=draw).to(torch.int8)
    step.state.accepts = accepts
    wanted = by_torch(step, "synthetic", 3)
    tokens, num_sampled, _ = by_kernels(step, "synthetic", device)
    assert tokens.equal(wanted.tokens)
    assert num_sampled.equal(wanted.num_sampled)
    batch = step.batch
    offered = (batch.draft_tokens >= 0).cumprod(1).sum(1)
    most = accepts[batch.slots, batch.seq_lens - batch.num_drafts]
    assert num_sampled.equal((torch.minimum(most, offered) + 1) * batch.samples)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("verification", "drafts"), RULES_AND_DRAFTS)
@pytest.mark.filterwarnings("ignore:overflow encountered")  # of numpy: -inf is meant
def test_rows_that_are_not_finite_are_marked(
    verification: str, drafts: str, make_step: Any, device: str
) -> None:
    """Catches a draft accepted by such a row, a mark lost after the statistics of chunks, and one
    for a row that no token came from; kernels mark what the reference marks."""
    step = steps(make_step, 3, 11, 0, drafts)
    batch, count = step.batch, len(step.batch.samples)
    clean = by_torch(step, verification, 3)
    assert not clean.not_finite.any()
    draw = torch.Generator().manual_seed(1)
    row = torch.minimum(torch.randint(0, 2, (count,), generator=draw), batch.num_drafts)
    for kind in (torch.nan, torch.inf, -torch.inf):
        broken = replace(step, logits=step.logits.clone())
        places = batch.verify_rows[torch.arange(count), row]
        columns = slice(None) if kind == -torch.inf else slice(2, 5)
        broken.logits[places, columns] = kind
        wanted = by_torch(broken, verification, 3)
        got = verified_by_kernels(broken, verification, device)
        assert got.not_finite.cpu().equal(wanted.not_finite)
        assert got.num_sampled.cpu().equal(wanted.num_sampled)
        marked = wanted.not_finite > 0
        assert not marked[~batch.samples].any()
        assert (wanted.num_sampled[marked] == row[marked] + 1).all()
        assert (wanted.num_sampled <= row + 1).all()
        if verification != "block":  # which looks ahead
            reached = batch.samples & (clean.num_sampled > row)
            assert marked.equal(reached)
        assert 2 < marked.sum() < count
        for tokens in (got.tokens.cpu(), wanted.tokens):
            assert tokens[~marked].equal(wanted.tokens[~marked])
            last = tokens[marked].gather(1, wanted.num_sampled[marked, None] - 1)
            assert ((last >= 0) & (last < 11)).all()


TRUNCATIONS = {
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.8},
    "min_p": {"min_p": 0.2},
    "all combined": {
        "top_k": torch.tensor([0, 3, 0, 1, 5, 0, 99, 2, 4]),
        "top_p": torch.tensor([1, 1, 0.5, 0.9, 0.7, 0.8, 0.6, 1, 0.01]),
        "min_p": torch.tensor([0, 0, 0, 0.1, 0, 0.3, 0, 0.9, 0]),
    },
}


@pytest.mark.parametrize(
    ("device", "truncation"),
    [
        ("cpu", "all combined"),
        *(pytest.param("cuda", name, marks=pytest.mark.gpu) for name in TRUNCATIONS),
    ],
)
@pytest.mark.parametrize(("verification", "drafts"), RULES_AND_DRAFTS)
def test_truncated_verdicts_are_those_of_the_reference(
    verification: str,
    truncation: str,
    drafts: str,
    make_step: Any,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The path of a verifier where kernels run, with flags for the truncations in use. Catches rows
    that are cut after they are read, or under another row's parameters."""
    given = TRUNCATIONS[truncation]
    flags = SamplingFlags(**{f"any_{name}": name in given for name in ("top_k", "top_p", "min_p")})
    verify = build_verifier(
        verification,
        synthetic_acceptance_length=LENGTH if verification == "synthetic" else None,
    )
    step = steps(make_step, 3, 70, len(truncation), drafts, **given)
    wanted = step.verdict(verify, flags)
    moved = step.to(device)
    with monkeypatch.context() as patch:
        patch.setattr(rejection, "runs_kernels", lambda _: True)
        got = moved.verdict(verify, flags)
    assert got.num_sampled.cpu().equal(wanted.num_sampled)
    assert got.num_rejected.cpu().equal(wanted.num_rejected)
    assert got.tokens.cpu().equal(wanted.tokens)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    "is_cut", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["cut", "whole"]
)
@pytest.mark.parametrize(("verification", "drafts"), RULES_AND_DRAFTS)
def test_chunks_without_mass_may_be_skipped(
    verification: str,
    drafts: str,
    is_cut: bool,
    make_step: Any,
    device: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where few chunks have mass, and where all have: the race has the same winner."""
    monkeypatch.setattr(launches, "CHUNK", 16)
    monkeypatch.setattr(reference, "CHUNK", 16)
    step = steps(make_step, 3, 90, 5, drafts)
    if is_cut:
        least = step.logits.nan_to_num().topk(3).values[:, -1:]
        step.logits = step.logits.masked_fill(step.logits < least, -torch.inf)
    for is_truncated in (False, True):
        assert_kernels_agree(step, verification, 3, device, is_truncated)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("verification", ["standard", "block"])
def test_drafts_from_a_narrower_vocabulary(verification: str, make_step: Any, device: str) -> None:
    """What the drafter's vocabulary lacks it proposes with probability 0."""
    ids = torch.tensor([9, 2, 3, 0, 7])
    for seed in range(2):
        step = steps(make_step, 3, 11, seed, "probabilistic")
        step.batch.draft_tokens = torch.where(
            step.batch.draft_tokens < 0, -1, ids[step.batch.draft_tokens % 5]
        )
        narrow = step.state.draft_probs[..., :5]
        step.state.draft_probs = narrow / narrow.sum(-1, keepdim=True)
        step.state.draft_vocab_map = ids
        assert_kernels_agree(step, verification, 3, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("drafts", ["one_hot", "probabilistic"])
@pytest.mark.parametrize("verification", ["standard", "block"])
def test_rows_of_several_chunks(
    verification: str, drafts: str, make_step: Any, device: str
) -> None:
    """Peaks and masses of chunks are combined; masked tokens have no mass."""
    draw = torch.Generator().manual_seed(9)
    logits = torch.randn(4, 3, 5000, generator=draw) * 3
    logits[..., 100:4000] = -torch.inf
    probs = torch.randn(4, 2, 5000, generator=draw).mul_(2).softmax(-1)
    tokens = torch.stack([logits[:, 0].argmax(-1), logits[:, 1].argmax(-1)], 1)
    step = make_step(
        logits,
        tokens,
        draft_probs=probs if drafts == "probabilistic" else None,
        seed=torch.arange(4),
        temperature=torch.tensor([0.3, 1.0, 2.0, 0.0]),
    )
    assert_kernels_agree(step, verification, 2, device)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("verification", ["standard", "block"])
def test_a_perfect_draft_is_accepted(verification: str, make_step: Any, device: str) -> None:
    """p = q up to rounding: the residual is empty or dust, and the emitted token legal."""
    logits = torch.randn(10, 3, 6, generator=torch.Generator().manual_seed(1))
    tokens = torch.randint(6, (10, 2), generator=torch.Generator().manual_seed(2))
    step = make_step(logits, tokens, draft_probs=logits[:, :2].softmax(-1), seed=torch.arange(10))
    emitted, num_sampled, _ = by_kernels(step, verification, device)
    assert int((num_sampled < 3).sum()) == 0
    assert emitted[:, :2].equal(tokens)
    assert ((emitted[:, 2] >= 0) & (emitted[:, 2] < 6)).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("verification", RULES)
def test_broken_logits_give_legal_ids(verification: str, make_step: Any, device: str) -> None:
    for value in (torch.nan, -torch.inf):
        step = make_step(torch.full((2, 3, 6), value), torch.tensor([[1, 2], [3, -1]]))
        tokens, num_sampled, _ = by_kernels(step, verification, device)
        emitted = tokens[torch.arange(3) < num_sampled[:, None]]
        assert ((emitted >= 0) & (emitted < 6)).all()


@pytest.mark.parametrize("verification", RULES)
def test_greedy_batches_need_choices_only(verification: str, make_step: Any) -> None:
    """The path of all-greedy batches gives the verdicts of the general path."""
    for seed in range(6):
        step = steps(make_step, 3, 5, seed, ["one_hot", "probabilistic"][seed % 2])
        step.state.temperature.zero_()
        general = by_torch(step, verification, 3)
        step.batch.all_greedy = True
        greedy = by_torch(step, verification, 3)
        assert greedy.tokens.equal(general.tokens)
        assert greedy.num_sampled.equal(general.num_sampled)
        assert greedy.num_rejected.equal(general.num_rejected)
