"""Truncation and token choice end, and are right, on adversarial rows and parameters.

On a GPU every truncation runs on every row at vocabularies up to 300,000, under a time limit that
ends the process: a kernel that never ends cannot be interrupted otherwise.
"""

from __future__ import annotations

from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
from hydraspec_kernels.runtime.ahead import can_compile_ahead, compiled_ahead
from hydraspec_kernels.sampling.random_streams import DrawKey, Purpose
from hydraspec_kernels.sampling.records import SamplingTensors
from hydraspec_kernels.sampling.token_choice import kernel as choice
from hydraspec_kernels.sampling.token_choice.reference import (
    draw_tokens_reference,
    greedy_tokens_reference,
    sample_with_probs_reference,
)
from hydraspec_kernels.sampling.truncation import truncate_, truncate_reference
from odd_rows import BROKEN, DTYPES, VOCABULARIES, check_kept, odd_rows, truncations
from torch import Tensor

# The interpreter's numpy says what a device does in silence: far from a huge peak, -inf is right.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
INF = torch.inf
NO_END = pytest.mark.timeout(60)  # a thread watches it, see `tests/conftest.py`


def cut(logits: Tensor, sampling: SamplingTensors) -> Tensor:
    """A request each row, truncated by the kernels."""
    slots = torch.arange(len(logits), device=logits.device)
    batch = SimpleNamespace(
        verify_rows=slots.view(-1, 1),
        num_drafts=torch.zeros_like(slots),
        samples=slots >= 0,
        slots=slots,
    )
    rows = logits.clone()
    truncate_(rows, batch, sampling)  # type: ignore[arg-type]
    return rows


def parameters(chosen: list[tuple[int, float, float]], device: str) -> SamplingTensors:
    """Of as many rows as chosen."""
    top_k, top_p, min_p = zip(*chosen, strict=True)
    temperature = torch.tensor([1.0, 0.3])[torch.arange(len(chosen)) % 2]
    return SamplingTensors(
        temperature=temperature.to(device),
        top_k=torch.tensor(top_k, device=device),
        top_p=torch.tensor(top_p, device=device),
        min_p=torch.tensor(min_p, device=device),
    )


def check_rows(names: list[str], logits: Tensor, given: SamplingTensors) -> None:
    """Both the kernels and the reference, where rows have a distribution; else that what is left
    is what was given, and something if something was."""
    got = cut(logits, given)
    is_broken = torch.tensor([name in BROKEN for name in names], device=logits.device)
    if not is_broken.all():
        rows = {name: values[~is_broken] for name, values in asdict(given).items()}
        whole = (logits[~is_broken], SamplingTensors(**rows))
        check_kept(got[~is_broken], *whole)
        check_kept(truncate_reference(*whole), *whole)
    left, broken = got[is_broken], logits[is_broken]
    is_left = left != -INF
    assert left[is_left].nan_to_num(7).equal(broken[is_left].nan_to_num(7))
    assert is_left.any(-1).equal((broken != -INF).any(-1))


@pytest.mark.parametrize(
    ("vocab", "count", "dtype"),
    [(1, 4, "float32"), (2, 5, "float16"), (3, 5, "float32"), (70, 11, "float16")],
)
def test_a_few_of_all_truncations(vocab: int, count: int, dtype: str) -> None:
    """Every row once; the interpreter rounds bfloat16 otherwise than a device."""
    rows, every = odd_rows(vocab), truncations(vocab)
    names = [list(rows)[i % len(rows)] for i in range(count)]
    chosen = [every[i * 31 % len(every)] for i in range(count)]
    logits = torch.stack([rows[name] for name in names]).to(DTYPES[dtype])
    check_rows(names, logits, parameters(chosen, "cpu"))


@pytest.mark.gpu
@NO_END
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_truncations_of_all_rows(dtype: str) -> None:
    """top_p alone hung GPUs for ever at vocabularies of 65 to 2,048 tokens."""
    device, vocabularies = torch.device("cuda"), (*VOCABULARIES, 300, 2_048)
    if can_compile_ahead(device):  # one after the other they take a minute
        with compiled_ahead(device):
            for vocab in vocabularies:
                one = torch.zeros(1, vocab, dtype=DTYPES[dtype], device="cuda")
                cut(one, parameters([(1, 1.0, 1.0)], "cuda"))
    for vocab in vocabularies:
        every = truncations(vocab)
        given = parameters(every, "cuda")
        for name, row in odd_rows(vocab).items():
            logits = row.to("cuda", DTYPES[dtype]).repeat(len(every), 1)
            check_rows([name] * len(every), logits, given)
    torch.cuda.synchronize()


def check_choices(vocab: int, dtype: torch.dtype, device: str) -> None:
    """The best token, one drawn from logits and one from weights, of every row."""
    rows = odd_rows(vocab)
    logits = torch.stack(list(rows.values())).to(device, dtype)
    count, whole = len(logits), [name not in BROKEN for name in rows]
    assert choice.greedy_tokens_kernel(logits).equal(greedy_tokens_reference(logits))
    keys = torch.arange(count, device=device)
    temperature = torch.tensor([1.0, 0.3, 1e-6, 0.0], device=device)[keys % 4]
    asked = (logits, temperature, DrawKey(keys, keys, Purpose.BONUS, 1))
    got, probs = choice.sample_with_probs_kernel(*asked)
    assert got[whole].equal(sample_with_probs_reference(*asked, any_greedy=True)[0][whole])
    assert not probs.isnan().any()
    weights = logits.float().exp()
    key = DrawKey(keys, keys, Purpose.DRAFT, 0)
    drawn = choice.draw_tokens_kernel(weights, key)
    wanted = draw_tokens_reference(weights, key)
    assert drawn[whole].equal(wanted[whole])
    for tokens in (got, drawn):
        assert ((tokens >= 0) & (tokens < vocab)).all()


@pytest.mark.parametrize("vocab", [1, 2, 3, 70])
def test_choices_of_odd_rows(vocab: int) -> None:
    check_choices(vocab, torch.float32, "cpu")


@pytest.mark.gpu
@NO_END
@pytest.mark.parametrize("dtype", DTYPES)
def test_choices_of_all_odd_rows(dtype: str) -> None:
    for vocab in VOCABULARIES:
        check_choices(vocab, DTYPES[dtype], "cuda")
    torch.cuda.synchronize()
