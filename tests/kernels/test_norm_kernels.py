"""Norm, residual and elementwise kernels against their references: in Triton's interpreter, and
compiled where there is a GPU.
"""

import pytest
import torch
from hydraspec_kernels import norms
from hydraspec_kernels.activation.kernel import gated_activation_cuda
from hydraspec_kernels.activation.reference import (
    gated_activation_reference,
)
from hydraspec_kernels.embedding.kernel import embed_beside_cuda, embed_cuda, embed_part_cuda
from hydraspec_kernels.embedding.ple_kernel import ple_inputs_cuda
from hydraspec_kernels.embedding.reference import (
    embed_beside_reference,
    embed_part_reference,
    embed_reference,
    ple_inputs_reference,
)
from hydraspec_kernels.norms.add_norm_kernel import add_norm_cuda
from hydraspec_kernels.norms.reference import add_norm_reference, rms_norm_reference
from hydraspec_kernels.norms.rms_norm_kernel import rms_norm_cuda
from kernel_places import DEVICES, PLACES, poison
from torch import Tensor

EPS = 1e-6
# A sum in another order moves a float32 result by some units in the last place, and a narrow one
# by one step where it was near a tie; what is added after that rounding can move it once more.
CLOSE = {
    torch.float32: {"rtol": 2e-6, "atol": 2e-6},
    torch.bfloat16: {"rtol": 2**-7, "atol": 2**-7},
    torch.float16: {"rtol": 2**-10, "atol": 2**-10},
}
# Against float64, in eps of the type: its roundings, and in float32 the sum and rsqrt as well.
STEPS = {torch.float32: 8, torch.bfloat16: 4, torch.float16: 4}
GPU_DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)


def draws(seed: int, dtype: torch.dtype, device: str, *shapes: tuple[int, ...]) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(s, generator=draw).to(device, dtype) for s in shapes]


def check_add_norm(
    rows: int,
    width: int,
    parts: int,
    dtype: torch.dtype,
    device: str,
    scale: float | None = None,
    has_post_norm: bool = True,
    weights: tuple[bool, bool] = (True, True),
) -> None:
    h, post, following = draws(0, dtype, device, (rows, width), (width,), (width,))
    (x,) = draws(1, torch.float32 if parts else dtype, device, (max(parts, 1), rows, width))
    x = x if parts else x[0]
    options = {
        "post_weight": post if weights[0] else None,
        "next_weight": following if weights[1] else None,
        "eps": EPS,
        "scale": scale,
        "has_post_norm": has_post_norm,
    }
    expected = add_norm_reference(h.clone(), x, **options)  # type: ignore[arg-type]
    found = add_norm_cuda(h, x, **options)  # type: ignore[arg-type]
    assert found.h is h
    torch.testing.assert_close(found.h, expected.h, **CLOSE[dtype])
    if weights[1]:
        torch.testing.assert_close(found.y, expected.y, **CLOSE[dtype])
    else:
        assert found.y is None


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize(
    ("rows", "width", "parts"),
    [(1, 64, 0), (3, 80, 1), (2, 24, 5), (5, 96, 16), (2, 1300, 3), (1, 1536, 0)],
)
def test_add_norm_sums_parts_norms_and_adds(rows, width, parts, dtype, device):
    check_add_norm(rows, width, parts, dtype, device, scale=0.7)


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("width", [40, 1400])
@pytest.mark.parametrize("weights", [(False, True), (True, False), (False, False)])
def test_add_norm_without_weights_or_without_a_next_norm(weights, width, dtype, device):
    check_add_norm(3, width, 2, dtype, device, weights=weights)


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("parts", [0, 3])
def test_add_norm_of_a_pre_norm_decoder_adds_the_block_as_it_is(parts, dtype, device):
    check_add_norm(3, 48, parts, dtype, device, has_post_norm=False)


def check_add_norm_against_float64(
    rows: int, width: int, parts: int, dtype: torch.dtype, device: str
) -> None:
    """Four roundings of terms no larger than |h| + |norm(x)|, then those of the next norm."""
    h, post, following = draws(0, dtype, device, (rows, width), (width,), (width,))
    (x,) = draws(1, torch.float32 if parts else dtype, device, (max(parts, 1), rows, width))
    old, scale, step = h.double(), 0.31, STEPS[dtype] * torch.finfo(dtype).eps
    found = add_norm_cuda(
        h, x if parts else x[0], post_weight=post, next_weight=following, eps=EPS, scale=scale
    )
    total = x.double().sum(0)
    gain = (total.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * post.double()
    exact = (old + total * gain) * scale
    smallest = torch.finfo(dtype).smallest_normal * torch.finfo(dtype).eps
    bound = step * (old.abs() + x.double().abs().sum(0) * gain.abs()) * scale + smallest
    assert ((found.h.double() - exact).abs() <= bound).all()
    gain = (exact.pow(2).mean(-1, keepdim=True) + EPS).rsqrt() * following.double()
    bound = bound * gain.abs() + step * (exact * gain).abs() + smallest
    assert found.y is not None
    assert ((found.y.double() - exact * gain).abs() <= bound).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("parts", [0, 5])
def test_add_norm_is_near_float64(parts, dtype):
    check_add_norm_against_float64(3, 72, parts, dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", GPU_DTYPES)
@pytest.mark.parametrize("width", [2560, 2816, 5376, 8192, 12288])
@pytest.mark.parametrize(("rows", "parts"), [(1, 8), (4, 16), (33, 2), (128, 0), (700, 0)])
def test_add_norm_at_model_sizes_is_near_float64(rows, width, parts, dtype):
    check_add_norm_against_float64(rows, width, parts, dtype, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("width", [2560, 5376])
@pytest.mark.parametrize("parts", [2, 4])
def test_a_row_does_not_depend_on_the_rows_beside_it(parts, width):
    h, w, v = draws(0, torch.bfloat16, "cuda", (37, width), (width,), (width,))
    (x,) = draws(1, torch.float32, "cuda", (parts, 37, width))
    options = {"post_weight": w, "next_weight": v, "eps": EPS}
    whole = add_norm_cuda(h.clone(), x, **options)
    alone = add_norm_cuda(h[9:10].clone(), x[:, 9:10], **options)
    assert torch.equal(whole.h[9:10], alone.h)
    assert torch.equal(whole.y[9:10], alone.y)


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("shape", [(1, 8), (7, 80), (3, 5, 24), (2, 1200)])
@pytest.mark.parametrize("weighted", [True, False])
def test_rms_norm_kernel_is_its_reference(shape, weighted, dtype, device):
    x, w = draws(2, dtype, device, shape, shape[-1:])
    weight = w if weighted else None
    expected = rms_norm_reference(x, weight, EPS)
    found = rms_norm_cuda(x, weight, EPS)
    torch.testing.assert_close(found, expected, **CLOSE[dtype])


def test_rows_too_wide_for_a_kernel_are_normed_all_the_same(monkeypatch):
    """An EAGLE-3 head norms three states of its target side by side: 36864 numbers at 12288."""
    monkeypatch.setattr(norms, "runs_kernels", lambda x: True)
    x, w = draws(5, torch.float32, "cpu", (2, 36864), (36864,))
    assert torch.equal(norms.rms_norm(x, w, EPS), rms_norm_reference(x, w, EPS))


@pytest.mark.parametrize("device", DEVICES)
def test_rms_norm_reads_heads_out_of_a_projection_and_keeps_zero_rows_finite(device):
    (x,) = draws(3, torch.float32, device, (5, 4 * 16))
    x[2] = 0
    for view in (x.view(5, 4, 16)[:, 1:3], x[:, 16:48], x.t(), x.view(5, 4, 16).transpose(0, 1)):
        expected = rms_norm_reference(view, None, EPS)
        found = rms_norm_cuda(view, None, EPS)
        assert found.is_contiguous()
        torch.testing.assert_close(found, expected, **CLOSE[torch.float32])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", GPU_DTYPES)
@pytest.mark.parametrize("shape", [(1, 2560), (128, 5376), (4099, 2560), (517, 32, 256), (3, 512)])
def test_rms_norm_at_model_sizes_is_within_a_rounding_of_float64(shape, dtype):
    x, w = draws(2, dtype, "cuda", shape, shape[-1:])
    exact = rms_norm_reference(x.double(), w.double(), EPS)
    torch.testing.assert_close(rms_norm_cuda(x, w, EPS).double(), exact, **CLOSE[dtype])


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # meant: the result is -0
@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("activation", ["gelu_tanh", "silu"])
@pytest.mark.parametrize("shape", [(1, 2), (3, 70), (2, 3, 34), (2, 2100)])
def test_gated_activation_kernels_are_their_references(shape, activation, dtype, device):
    (x,) = draws(4, dtype, device, shape)
    x *= 6  # into the tails, where exp overflows or vanishes
    x.flatten()[0] = -90.0
    expected = gated_activation_reference(x, activation)
    found = gated_activation_cuda(x, activation)
    torch.testing.assert_close(found, expected, **CLOSE[dtype])


@pytest.mark.parametrize("device", DEVICES)
def test_gated_activation_reads_rows_out_of_a_wider_tensor(device):
    (x,) = draws(5, torch.float32, device, (4, 60))
    found = gated_activation_cuda(x[:, 10:50], "silu")
    torch.testing.assert_close(
        found, gated_activation_reference(x[:, 10:50], "silu"), **CLOSE[torch.float32]
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", GPU_DTYPES)
@pytest.mark.parametrize("activation", ["gelu_tanh", "silu"])
def test_gated_activations_at_model_sizes_are_near_float64(activation, dtype):
    (x,) = draws(4, dtype, "cuda", (1031, 2 * 10240))
    found = gated_activation_cuda(x, activation)
    torch.testing.assert_close(
        found.double(), gated_activation_reference(x.double(), activation), **CLOSE[dtype]
    )


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize(("layers", "width"), [(3, 16), (7, 24), (35, 32)])
def test_per_layer_inputs_are_their_reference(layers, width, dtype, device):
    table, wide, weight = draws(
        6, dtype, device, (9, layers * width), (5, layers * width + 8), (width,)
    )
    projected = wide[:, : layers * width]
    ids = torch.tensor([3, 8, 9, -1, 0], device=device)  # 9 and -1 are not in the table
    scales = {"table_scale": width**0.5, "projection_scale": 0.021, "eps": EPS}
    expected = ple_inputs_reference(ids, table, projected.contiguous(), weight, **scales)
    found = ple_inputs_cuda(ids, table, projected, weight, **scales)
    assert found.shape == (5, layers, width)
    torch.testing.assert_close(found, expected, **CLOSE[dtype])


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("named", [True, False], ids=["rows named", "rows in order"])
def test_embedding_beside_hidden_rows(named, dtype, device):
    """Widths that no block divides; rows of another tensor's stride."""
    table, wide = draws(7, dtype, device, (11, 24), (5, 50))
    hidden, ids = wide[:, :40], torch.tensor([3, 0, 10], device=device)
    rows = torch.tensor([4, 0, 2], device=device) if named else None
    hidden = hidden if named else hidden[:3]
    expected = embed_beside_reference(ids, table, 1.7, hidden, rows)
    found = embed_beside_cuda(ids, table, 1.7, hidden, rows)
    assert found.equal(expected)


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("scale", [None, 1.7])
@pytest.mark.parametrize("width", [8, 1100])
def test_embedding_is_its_reference(width, scale, dtype, device):
    (table,) = draws(7, dtype, device, (11, width))
    ids = torch.tensor([[10, 0, 3], [3, 7, 1]], device=device)
    expected = embed_reference(ids, table, scale)
    found = embed_cuda(ids, table, scale)
    assert torch.equal(found, expected)
    outside = embed_cuda(torch.tensor([-1, 11], device=device), table, scale)
    assert torch.equal(outside, expected[:1, 1].expand(2, -1))


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("scale", [None, 1.7])
@pytest.mark.parametrize("width", [8, 1100])
def test_parts_of_an_embedding_add_up_to_it(width, scale, dtype, device):
    """Padding rows hold NaN, which must not show; ids outside the vocabulary give zeros."""
    (table,) = draws(7, dtype, device, (11, width))
    ids = torch.tensor([[10, 0, 3], [3, 7, 4]], device=device)
    outside = torch.tensor([-1, 11, 12, 1 << 30], device=device)
    parts = []
    for first, count in ((0, 4), (4, 4), (8, 3), (11, 0)):
        padding = table.new_full((4 - count, width), float("nan"))
        part = torch.cat((table[first : first + count], padding))
        parts.append(embed_part_cuda(ids, part, first, count, scale))
        assert parts[-1].equal(embed_part_reference(ids, part, first, count, scale))
        assert not embed_part_cuda(outside, part, first, count, scale).any()
    assert sum(parts).equal(embed_reference(ids, table, scale))
