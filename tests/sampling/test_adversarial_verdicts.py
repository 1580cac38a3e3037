"""Verdicts on adversarial rows and truncations: kernels end, and emit the reference's tokens.

`tests/kernels/test_adversarial_rows.py` tests what truncation keeps; here the reference verifies
rows that the kernels have truncated.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hydraspec_kernels.runtime.ahead import can_compile_ahead, compiled_ahead
from hydraspec_kernels.sampling import rejection
from odd_rows import BROKEN, DTYPES, VOCABULARIES, odd_rows, truncations

from hydraspec.sampling.verifier import build_verifier
from hydraspec.types import SamplingFlags

K = 2
LENGTH = 1.7
RULES = ("standard", "block", "synthetic")
TRUNCATED = SamplingFlags(any_top_k=True, any_top_p=True, any_min_p=True)
WHOLE = SamplingFlags(any_top_k=False, any_top_p=False, any_min_p=False)
# The interpreter's numpy says what a device does in silence: far from a huge peak, -inf is right.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


def odd_step(
    make_step: Any, vocab: int, first: int, sampled: bool, dtype: torch.dtype, stride: int
) -> Any:
    """A request for every `stride`-th row: that one and the two before it; drafts likely or not."""
    rows, every = dict(list(odd_rows(vocab).items())[::stride]), truncations(vocab)
    each = torch.stack(list(rows.values()))
    count = len(each)
    logits = torch.stack([each, each.roll(1, 0), each.roll(2, 0)], 1)
    chosen = [every[(first + i) * 31 % len(every)] for i in range(count)]
    top_k, top_p, min_p = (torch.tensor(x) for x in zip(*chosen, strict=True))
    draw = torch.Generator().manual_seed(first)
    best = logits[:, :K].nan_to_num(nan=0, posinf=9, neginf=-9).argmax(-1)
    other = torch.randint(vocab, (count, K), generator=draw)
    is_best = torch.rand(count, K, generator=draw) < 0.7
    probs = torch.randn(count, K, vocab, generator=draw).softmax(-1) if sampled else None
    step = make_step(
        logits,
        torch.where(is_best, best, other),
        draft_probs=probs,
        temperature=torch.tensor([1.0, 0.3, 0.0, 2.5])[torch.arange(count) % 4],
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
        seed=torch.arange(count) + 100 * first,
    )
    step.logits = step.logits.to(dtype)
    whole = torch.tensor([name not in BROKEN for name in rows])
    return step, whole & whole.roll(1) & whole.roll(2)


def check_verdicts(
    make_step: Any,
    vocab: int,
    device: str,
    dtype: torch.dtype,
    cases: list[tuple[str, bool]],
    stride: int = 1,
) -> None:
    """The kernels' verdict on truncated rows is the reference's on the same truncated rows; tokens
    of rows without a distribution are in the vocabulary."""
    for i, (rule, sampled) in enumerate(cases):
        step, whole = odd_step(make_step, vocab, vocab + 7 * i, sampled, dtype, stride)
        step, verify = step.to(device), build(rule)
        got = by_kernels(step, verify)  # and cuts the logits
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(rejection, "runs_kernels", lambda _: False)
            wanted = step.verdict(verify, WHOLE)
        count, tokens = got.num_sampled.cpu(), got.tokens.cpu()
        emitted = tokens[torch.arange(K + 1) < count[:, None]]
        assert ((count >= 1) & (count <= K + 1)).all()
        assert ((emitted >= 0) & (emitted < vocab)).all()
        assert count[whole].equal(wanted.num_sampled.cpu()[whole]), (rule, sampled)
        assert tokens[whole].equal(wanted.tokens.cpu()[whole]), (rule, sampled)


def build(rule: str) -> Any:
    length = LENGTH if rule == "synthetic" else None
    return build_verifier(rule, synthetic_acceptance_length=length)


def by_kernels(step: Any, verify: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rejection, "runs_kernels", lambda _: True)
        return step.verdict(verify, TRUNCATED)


@pytest.mark.parametrize("rule", ["standard", "block"])
def test_a_few_verdicts(rule: str, make_step: Any) -> None:
    """The other rows, rules and vocabularies need a device: a row takes the interpreter 0.2 s."""
    check_verdicts(make_step, 3, "cpu", torch.float32, [(rule, rule == "block")], stride=4)


@pytest.mark.gpu
@pytest.mark.timeout(60)  # a thread watches it, see `tests/conftest.py`
@pytest.mark.parametrize(
    ("dtype", "vocabularies"),
    [
        ("float32", (*VOCABULARIES, 300)),
        ("bfloat16", (70, 1_000, 262_144)),
        ("float16", (70, 1_000, 262_144)),
    ],
    ids=DTYPES,
)
def test_verdicts_at_all_vocabularies(
    dtype: str, vocabularies: tuple[int, ...], make_step: Any
) -> None:
    """Every rule, argmax and sampled drafts: kernels end although every row may be adversarial."""
    cases = [(rule, sampled) for rule in RULES for sampled in (False, True)]
    small = [
        (odd_step(make_step, vocab, 0, sampled, DTYPES[dtype], 99)[0].to("cuda"), build(rule))
        for vocab in vocabularies
        for rule, sampled in cases
    ]
    if can_compile_ahead(torch.device("cuda")):  # one after the other they take a minute
        with compiled_ahead(torch.device("cuda")):
            for step, verify in small:
                by_kernels(step, verify)
    for vocab in vocabularies:
        check_verdicts(make_step, vocab, "cuda", DTYPES[dtype], cases)
    torch.cuda.synchronize()
