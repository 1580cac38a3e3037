"""Adversarial rows of logits for searches and draws, and a check of what truncation keeps."""

from __future__ import annotations

from itertools import product

import torch
from hydraspec_kernels.sampling.records import SamplingTensors
from hydraspec_kernels.sampling.truncation.reference import kth_largest
from torch import Tensor

INF = torch.inf
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
VOCABULARIES = (1, 2, 3, 70, 1_000, 32_768, 262_144, 300_000)
TOP_P = (1.0, 0.0, 1e-9, 0.5, 1 - 1e-9, 0.8)
MIN_P = (0.0, 1e-9, 1.0)
# More mass than sums in another order differ by, see `truncation.truncate_`.
SLACK = 2e-5
BROKEN = ("nan", "all nan", "infinite", "nothing")  # no distribution, but an end and legal ids


def odd_rows(vocab: int) -> dict[str, Tensor]:
    """[V] float32 each, by name."""
    draw = torch.Generator().manual_seed(vocab)
    noise = torch.randn(vocab, generator=draw)
    at = int(torch.randint(vocab, (1,), generator=draw))
    rows = {
        "flat": noise * 1e-3,
        "equal": torch.full((vocab,), 1.5),
        "spread": noise * 3,
        "peaked": torch.rand(vocab, generator=draw).argsort().add(1.0).log().mul(-1.5),
        "two values": (noise > 1).float(),
        "small and zeros": torch.where(noise > 0, 1e-6 * noise, -0.0),
        "one": torch.full((vocab,), -INF),
        "nan": noise.clone(),
        "all nan": torch.full((vocab,), torch.nan),
        "infinite": noise.clone(),
        "nothing": torch.full((vocab,), -INF),
    }
    rows["one"][at], rows["nan"][at], rows["infinite"][at] = -3.0, torch.nan, INF
    return rows


def truncations(vocab: int) -> list[tuple[int, float, float]]:
    """top_k, top_p and min_p: each alone, and all combined."""
    return list(product((0, 1, vocab, vocab + 9), TOP_P, MIN_P))


def check_kept(got: Tensor, logits: Tensor, sampling: SamplingTensors) -> None:
    """That rows [N, V] without NaN or +inf are cut as the definition cuts them, with masses in
    float64; where a mass is top_p up to SLACK, either side is right."""
    wide, top_p, least = logits.float(), sampling.top_p, sampling.min_p.unsqueeze(-1)
    scaled = (wide - wide.amax(-1, keepdim=True)) / sampling.temperature.unsqueeze(-1)
    ordered, order = scaled.sort(dim=-1, descending=True, stable=True)
    is_in = ordered >= kth_largest(ordered, sampling.top_k)
    mass = torch.where(is_in, ordered, -INF).double().softmax(-1)
    before, limit = mass.cumsum(-1) - mass, top_p.unsqueeze(-1).double()
    weight = ordered.exp()
    is_in &= ordered > -INF
    surely = is_in & ((before < limit - SLACK) | (limit >= 1)) & (weight >= least * (1 + 1e-5))
    maybe = is_in & ((before < limit + SLACK) | (limit >= 1)) & (weight >= least * (1 - 1e-5))
    surely[:, 0] = maybe[:, 0] = True  # the best stays
    kept = (got > -INF).gather(-1, order)
    assert (kept >= surely).all(), "a token is cut that is to stay"
    assert (kept <= maybe).all(), "a token stays that is to be cut"
    assert (kept[:, 1:] <= kept[:, :-1]).all(), "a worse token stays, or of equal ones a later"
    assert torch.where(got > -INF, got, 0).equal(torch.where(got > -INF, logits, 0))
