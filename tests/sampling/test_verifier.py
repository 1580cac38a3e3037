"""Verification with exact tokens: what must be accepted, rejected and emitted, case by case."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hydraspec_kernels.sampling.random_streams import DrawKey, Purpose
from hydraspec_kernels.sampling.rejection import reference
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from hydraspec.sampling.verifier import Verifier, build_verifier

VOCAB = 6
METHODS = ["standard", "block", "synthetic"]
LOSSLESS = ["standard", "block"]
DRAFTS = ["one_hot", "probabilistic"]


def build(verification: str, num_drafts: int = 3, length: float = 2.5) -> Verifier:
    return build_verifier(
        verification,
        synthetic_acceptance_length=length if verification == "synthetic" else None,
    )


def sure(tokens: list[list[int]]) -> Tensor:
    """Logits [B, R, V] of a target that can only say these tokens."""
    return torch.nn.functional.one_hot(torch.tensor(tokens), VOCAB).double().log()


def one_hot(tokens: Tensor) -> Tensor:
    return torch.nn.functional.one_hot(tokens, VOCAB).float()


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


TARGET = [[1, 2, 3, 4]] * 6
DRAFTED = torch.tensor([[1, 2, 3], [1, 2, 0], [1, 0, 3], [0, 2, 3], [1, -1, 3], [-1, 2, 3]])
EXPECTED = [[1, 2, 3, 4], [1, 2, 3, -1], [1, 2, -1, -1], [1, -1, -1, -1],
            [1, 2, -1, -1], [1, -1, -1, -1]]  # fmt: skip


@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("verification", LOSSLESS)
@pytest.mark.parametrize("rule", ["all_greedy", "temperature_0", "certain_target"])
def test_every_accepted_length(rule: str, verification: str, drafts: str, make_step: Any) -> None:
    """Always, sometimes, never accepted; nothing after a missing draft; the same on three paths.

    temperature_0 is a greedy request in a mixed batch; certain_target samples at temperature 1.
    """
    logits = sure(TARGET)
    if rule != "certain_target":
        logits = torch.where(logits == 0, 5.0, randn(6, 4, VOCAB).double())
    step = make_step(
        logits,
        DRAFTED,
        draft_probs=one_hot(DRAFTED.clamp(min=0)) if drafts == "probabilistic" else None,
        temperature=1.0 if rule == "certain_target" else 0.0,
        all_greedy=rule == "all_greedy",
    )
    verdict = step.verdict(build(verification))
    assert verdict.tokens.tolist() == EXPECTED
    assert verdict.num_sampled.tolist() == [4, 3, 2, 1, 2, 1]
    assert verdict.num_rejected.tolist() == [0, 1, 2, 3, 2, 3]


@pytest.mark.parametrize("all_greedy", [True, False])
@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("verification", LOSSLESS)
def test_prefill_decode_and_fewer_drafts_in_one_batch(
    verification: str, drafts: str, all_greedy: bool, make_step: Any
) -> None:
    """A prefill chunk that does not sample, a final one, and 1 to 3 drafts; the rest is NaN."""
    drafted = torch.tensor([[1, 2, 3]] * 5)
    step = make_step(
        sure([[1, 2, 3, 4]] * 5),
        drafted,
        draft_probs=one_hot(drafted) if drafts == "probabilistic" else None,
        num_drafts=torch.tensor([0, 0, 1, 2, 3]),
        samples=torch.tensor([False, True, True, True, True]),
        temperature=0.0 if all_greedy else torch.tensor([1.0, 1.0, 0.0, 1.0, 1.0]),
        all_greedy=all_greedy,
    )
    verdict = step.verdict(build(verification))
    assert verdict.tokens.tolist() == [
        [-1, -1, -1, -1], [1, -1, -1, -1], [1, 2, -1, -1], [1, 2, 3, -1], [1, 2, 3, 4]
    ]  # fmt: skip
    assert verdict.num_sampled.tolist() == [0, 1, 2, 3, 4]
    assert verdict.num_rejected.tolist() == [0, 0, 0, 0, 0]


@pytest.mark.parametrize("all_greedy", [True, False])
@pytest.mark.parametrize("verification", METHODS)
def test_no_drafter(verification: str, all_greedy: bool, make_step: Any) -> None:
    """K = 0 is plain decoding: one token, none rejected, none where the request does not sample."""
    step = make_step(
        sure([[4], [2]]),
        torch.empty(2, 0, dtype=torch.long),
        samples=torch.tensor([True, False]),
        temperature=0.0 if all_greedy else 1.0,
        all_greedy=all_greedy,
    )
    verdict = step.verdict(build(verification))
    assert verdict.tokens.tolist() == [[4], [-1]]
    assert verdict.num_sampled.tolist() == [1, 0]
    assert verdict.num_rejected.tolist() == [0, 0]


@pytest.mark.parametrize("all_greedy", [True, False])
@pytest.mark.parametrize("verification", METHODS)
def test_padding_requests_of_a_graph_count_nothing(
    verification: str, all_greedy: bool, make_step: Any
) -> None:
    """A request that does not sample emits and rejects nothing, even with stale drafts."""
    step = make_step(
        sure([[1, 2, 3, 4]]),
        torch.tensor([[1, 2, 0]]),
        samples=torch.tensor([False]),
        temperature=0.0,
        all_greedy=all_greedy,
    )
    verdict = step.verdict(build(verification))
    assert verdict.tokens.tolist() == [[-1] * 4]
    assert verdict.num_sampled.tolist() == [0]
    assert verdict.num_rejected.tolist() == [0]


@pytest.mark.parametrize("all_greedy", [True, False])
@pytest.mark.parametrize("verification", METHODS)
def test_a_step_without_logits(verification: str, all_greedy: bool, make_step: Any) -> None:
    """Prefill chunks only: N = 0, and verify_rows name rows that do not exist."""
    step = make_step(
        sure([[1, 2]] * 3),
        torch.full((3, 1), -1),
        num_drafts=torch.zeros(3, dtype=torch.long),
        samples=torch.zeros(3, dtype=torch.bool),
        all_greedy=all_greedy,
    )
    step.logits = step.logits[:0]
    verdict = step.verdict(build(verification))
    assert verdict.tokens.tolist() == [[-1, -1]] * 3
    assert verdict.num_sampled.tolist() == verdict.num_rejected.tolist() == [0, 0, 0]


@pytest.mark.parametrize("stale", ["zeros", "sure_of_target", "noise"])
@pytest.mark.parametrize("verification", LOSSLESS)
def test_greedy_requests_ignore_stale_draft_probs(
    verification: str, stale: str, make_step: Any
) -> None:
    """An all-greedy batch writes no draft_probs; joined by a sampling request they are stale."""
    probs = {
        "zeros": torch.zeros(6, 3, VOCAB),
        "sure_of_target": one_hot(torch.tensor([[1, 2, 3]] * 6)),
        "noise": randn(6, 3, VOCAB).softmax(-1),
    }[stale]
    step = make_step(sure(TARGET), DRAFTED, draft_probs=probs, temperature=0.0)
    assert step.verdict(build(verification)).tokens.tolist() == EXPECTED


@pytest.mark.parametrize("verification", LOSSLESS)
def test_a_perfect_draft_is_always_accepted(verification: str, make_step: Any) -> None:
    """p = q, bit for bit: ratio 1, empty residual, 0 / 0 in block verification."""
    logits = randn(500, 4, VOCAB)
    drafted = torch.randint(VOCAB, (500, 3), generator=torch.Generator().manual_seed(1))
    step = make_step(logits, drafted, draft_probs=logits[:, :3].softmax(-1), seed=torch.arange(500))
    verdict = step.verdict(build(verification))
    assert verdict.tokens[:, :3].equal(drafted)
    assert verdict.num_sampled.tolist() == [4] * 500
    assert verdict.tokens[:, 3].unique().tolist() == list(range(VOCAB))


@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("verification", LOSSLESS)
def test_impossible_drafts_are_never_accepted_nor_recovered(
    verification: str, drafts: str, make_step: Any
) -> None:
    """p(x) = 0, here by top_k = 2: the recovered token is one of the other two."""
    logits = torch.tensor([0.0, 1.0, 9.0, 2.0, 9.0, 0.0]).expand(300, 4, VOCAB)
    drafted = torch.tensor([[0, 1, 3]]).expand(300, 3)
    probs = torch.full((300, 3, VOCAB), 1 / VOCAB) if drafts == "probabilistic" else None
    step = make_step(logits, drafted, draft_probs=probs, top_k=2, seed=torch.arange(300))
    verdict = step.verdict(build(verification))
    assert verdict.num_rejected.tolist() == [3] * 300
    assert verdict.tokens[:, 0].unique().tolist() == [2, 4]


@pytest.mark.parametrize("verification", LOSSLESS)
def test_recovered_token_comes_from_the_residual(verification: str, make_step: Any) -> None:
    """p = (1/2, 1/2), q = (3/4, 1/4): token 0 is kept 2 times of 3, else it becomes 1."""
    target = torch.tensor([0.5, 0.5, 0, 0, 0, 0]).log().expand(3000, 2, VOCAB)
    probs = torch.tensor([0.75, 0.25, 0, 0, 0, 0]).expand(3000, 1, VOCAB)
    drafted = torch.zeros(3000, 1, dtype=torch.long)
    step = make_step(target, drafted, draft_probs=probs, seed=torch.arange(3000))
    verdict = step.verdict(build(verification, 1))
    rejected = verdict.num_rejected == 1
    assert verdict.tokens[rejected, 0].unique().tolist() == [1]
    assert verdict.tokens[~rejected, 0].unique().tolist() == [0]
    assert abs(float((~rejected).double().mean()) - 2 / 3) < 5 * (2 / 9 / 3000) ** 0.5


EXTREMES = {
    "u=0": (0.0, None, None),
    "u=1": (1.0, None, None),
    "q(x)=0": (0.0, "zero_at_draft", None),
    "p=q, yet rejected": (1.0, "target", None),
    "p=0 at the draft": (0.0, None, "zero_at_draft"),
}


@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("case", EXTREMES)
@pytest.mark.parametrize("verification", LOSSLESS)
def test_extreme_draws_and_distributions_stay_legal(
    verification: str, case: str, drafts: str, make_step: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draws of exactly 0 and 1 cannot occur; even so no NaN, no illegal token, no 0 < 0."""
    draw, draft, target = EXTREMES[case]
    logits = randn(20, 4, VOCAB).double()
    drafted = torch.randint(VOCAB, (20, 3), generator=torch.Generator().manual_seed(5))
    at = drafted[..., None]
    probs = randn(20, 3, VOCAB, seed=2).softmax(-1)
    if target == "zero_at_draft":
        logits[:, :3] = logits[:, :3].scatter(-1, at, -torch.inf)
    if draft == "zero_at_draft":
        probs = probs.scatter(-1, at, 0.0)
    if draft == "target":
        probs = logits[:, :3].softmax(-1).float()
        logits[:, :3] = probs.double().log()
    monkeypatch.setattr(
        reference,
        "uniform",
        lambda seed, position, purpose, index: torch.full_like(position, draw, dtype=torch.double),
    )
    step = make_step(logits, drafted, draft_probs=probs if drafts == "probabilistic" else None)
    verdict = step.verdict(build(verification))
    emitted = verdict.tokens[torch.arange(4) < verdict.num_sampled[:, None]]
    assert ((emitted >= 0) & (emitted < VOCAB)).all()
    if target == "zero_at_draft" or (draft == "zero_at_draft" and drafts == "probabilistic"):
        assert verdict.num_sampled.tolist() == [1] * 20
    elif draw == 0:
        assert verdict.num_sampled.tolist() == [4] * 20


@pytest.mark.parametrize("verification", METHODS)
def test_broken_logits_give_legal_ids(verification: str, make_step: Any) -> None:
    """NaN rows emit an id of the vocabulary, not an index that crashes the next step."""
    drafted = torch.tensor([[1, 2, 3]])
    for all_greedy in (True, False):
        step = make_step(
            torch.full((1, 4, VOCAB), torch.nan), drafted, all_greedy=all_greedy,
            temperature=0.0 if all_greedy else 1.0,
        )  # fmt: skip
        verdict = step.verdict(build(verification))
        emitted = verdict.tokens[0, : int(verdict.num_sampled)]
        assert ((emitted >= 0) & (emitted < VOCAB)).all()


@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("verification", METHODS)
def test_tokens_do_not_depend_on_the_batch(verification: str, drafts: str, make_step: Any) -> None:
    """Each request alone emits what it emits among others, with parameters of all kinds mixed."""
    count = 24
    request = torch.arange(count)
    whole: dict[str, Any] = {
        "draft_probs": randn(count, 3, VOCAB, seed=1).softmax(-1),
        "num_drafts": request % 4,
        "temperature": torch.tensor([0.0, 0.7, 1.3])[request % 3],
        "top_k": torch.tensor([0, 3])[request % 2],
        "top_p": torch.tensor([1.0, 0.8, 0.5, 1.0])[request // 3 % 4],
        "min_p": torch.tensor([0.0, 0.1])[request // 2 % 2],
        "seed": request * 31,
        "num_computed": request * 5,
    }
    if drafts == "one_hot":
        del whole["draft_probs"]
    logits = randn(count, 4, VOCAB)
    drafted = torch.randint(VOCAB, (count, 3), generator=torch.Generator().manual_seed(4))
    verify = build(verification)
    together = make_step(logits, drafted, **whole).verdict(verify).tokens
    for row in range(count):
        part = {name: value[row : row + 1] for name, value in whole.items()}
        alone = make_step(logits[row : row + 1], drafted[row : row + 1], **part)
        assert alone.verdict(verify).tokens[0].equal(together[row])


@pytest.mark.parametrize("verification", METHODS)
def test_draws_are_keyed_by_predicted_position_purpose_and_index(
    verification: str, make_step: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Row j predicts position computed + rows - drafts + j, also at the end of a prefill chunk."""
    seen: dict[str, list[Any]] = {}

    def spy_uniform(seed: Tensor, position: Tensor, purpose: Purpose, index: Tensor) -> Tensor:
        seen["accept"] = [position.tolist(), purpose, index.tolist()]
        return torch.full_like(position, 0.5, dtype=torch.double)

    def spy_draw(weights: Tensor, key: DrawKey) -> Tensor:
        seen["next"] = [part.tolist() for part in key]  # type: ignore[union-attr]
        return weights.argmax(-1)

    monkeypatch.setattr(reference, "uniform", spy_uniform)
    monkeypatch.setattr(reference, "draw_tokens", spy_draw)
    step = make_step(
        sure([[1, 2, 3, 4], [1, 2, 3, 4], [5, 0, 0, 0]]),
        torch.tensor([[1, 0, 3], [1, 2, 3], [0, 0, 0]]),
        num_drafts=torch.tensor([3, 2, 0]),
        seed=torch.tensor([7, 8, 9]),
        num_computed=torch.tensor([10, 20, 30]),
    )
    step.batch.seq_lens[2] += 6  # a prefill of 7 rows: computed 30, so its token is number 37
    step.verdict(build(verification, length=3.0))
    assert seen["accept"] == [
        [[11, 12, 13], [21, 22, 23], [37, 38, 39]], Purpose.ACCEPT, [0, 1, 2]
    ]  # fmt: skip
    if verification == "synthetic":
        purposes, lengths = [Purpose.BONUS] * 3, [2, 2, 0]
    else:
        purposes, lengths = [Purpose.RESIDUAL, Purpose.BONUS, Purpose.BONUS], [1, 2, 0]
    positions = [base + length for base, length in zip([11, 21, 37], lengths, strict=True)]
    assert seen["next"] == [[7, 8, 9], positions, purposes, lengths]


@pytest.mark.parametrize("length", [1.0, 1.4, 2.0, 3.25, 4.0])
@pytest.mark.parametrize("all_greedy", [True, False])
def test_synthetic_length_is_met_whatever_the_drafts(
    length: float, all_greedy: bool, make_step: Any
) -> None:
    """L - 1 is ones, one fraction, zeros; the token after the drafts is the target's."""
    count = 4000
    step = make_step(
        sure([[1, 2, 3, 4]] * count),
        torch.zeros(count, 3, dtype=torch.long),
        seed=torch.arange(count),
        temperature=0.0 if all_greedy else 1.0,
        all_greedy=all_greedy,
    )
    verdict = step.verdict(build("synthetic", length=length))
    sampled = verdict.num_sampled
    assert set(sampled.tolist()) <= {int(length), int(length) + 1}
    assert abs(float(sampled.double().mean()) - length) < 5 * 0.5 / count**0.5
    last = verdict.tokens.gather(1, sampled[:, None] - 1).squeeze(1)
    assert last.equal(sampled)  # the target says 1, 2, 3, 4


def test_synthetic_rejects_missing_drafts(make_step: Any) -> None:
    step = make_step(sure([[1, 2, 3, 4]]), torch.tensor([[5, -1, 5]]))
    verdict = step.verdict(build("synthetic", length=4.0))
    assert verdict.tokens.tolist() == [[5, 2, -1, -1]]
    assert verdict.num_rejected.tolist() == [2]


@pytest.mark.parametrize("all_greedy", [True, False])
@pytest.mark.parametrize("drafts", DRAFTS)
@pytest.mark.parametrize("num_drafts", [0, 1, 3])
@pytest.mark.parametrize("verification", METHODS)
def test_the_device_is_never_asked(
    verification: str, num_drafts: int, drafts: str, all_greedy: bool, make_step: Any
) -> None:
    """FakeTensorMode raises on item, tolist, numpy and shapes that depend on data."""
    with FakeTensorMode():
        drafted = torch.zeros(5, num_drafts, dtype=torch.long)
        probs = torch.full((5, num_drafts, VOCAB), 1 / VOCAB)
        step = make_step(
            torch.zeros(5, num_drafts + 1, VOCAB),
            drafted,
            draft_probs=probs if drafts == "probabilistic" else None,
            all_greedy=all_greedy,
        )
        verdict = step.verdict(build(verification, num_drafts, length=1.0))
    assert isinstance(verdict.tokens, FakeTensor)
    assert verdict.tokens.shape == (5, num_drafts + 1)
    assert verdict.num_sampled.shape == verdict.num_rejected.shape == (5,)
