"""From the projection to queries and cache, and the rotary kernels, against their references."""

import dataclasses

import pytest
import torch
from hydraspec_kernels.attention import Projection, QkvShape, with_gain, write_qkv
from hydraspec_kernels.attention.qkv_kernel import write_qkv_cuda
from hydraspec_kernels.attention.reference import write_qkv_reference
from hydraspec_kernels.norms import rms_norm
from hydraspec_kernels.rope import apply_rope, mirrored, rope_frequencies, rope_table
from hydraspec_kernels.rope.kernel import apply_rope_cuda, rope_table_cuda
from hydraspec_kernels.rope.reference import apply_rope_reference, rope_table_reference
from kernel_places import DEVICES, PLACES, poison
from torch import Tensor

EPS = 1e-6
# The norm's sum runs in another order, then two roundings: a step of the narrow type, twice.
CLOSE = {
    torch.float32: {"rtol": 2e-6, "atol": 4e-6},
    torch.bfloat16: {"rtol": 2**-7, "atol": 2**-6},
    torch.float16: {"rtol": 2**-10, "atol": 2**-9},
}
# Against float64, in eps of the type: its roundings, and in float32 the sum and rsqrt as well.
STEPS = {torch.float32: 8, torch.bfloat16: 3, torch.float16: 3}

SHAPES = {
    "gemma": QkvShape(num_heads=4, num_kv_heads=2, head_dim=16, eps=EPS, value_norm=True),
    "gemma k_eq_v": QkvShape(
        num_heads=5, num_kv_heads=3, head_dim=32, eps=EPS, value_norm=True, k_eq_v=True
    ),
    "qwen": QkvShape(num_heads=6, num_kv_heads=1, head_dim=8, eps=EPS),
    "llama": QkvShape(num_heads=3, num_kv_heads=3, head_dim=10, eps=EPS),
    "keys and values alone": QkvShape(
        num_heads=0, num_kv_heads=2, head_dim=16, eps=EPS, value_norm=True
    ),
    "keys alone": QkvShape(
        num_heads=0, num_kv_heads=3, head_dim=32, eps=EPS, value_norm=True, k_eq_v=True
    ),
    "k_eq_v raw": QkvShape(num_heads=2, num_kv_heads=2, head_dim=12, eps=EPS, k_eq_v=True),
}
WITHOUT_HEAD_NORMS = {"llama"}


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    poison(monkeypatch)


def drawn_shape(name: str, dtype: torch.dtype, device: str) -> QkvShape:
    shape = SHAPES[name]
    if name in WITHOUT_HEAD_NORMS:
        return shape
    draw = torch.Generator().manual_seed(5)
    q, k = (torch.randn(shape.head_dim, generator=draw).to(device, dtype) for _ in range(2))
    return dataclasses.replace(shape, q_weight=q, k_weight=k)


def inputs(
    shape: QkvShape, slots: list[int], dtype: torch.dtype, device: str, *, writes: bool = True
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None]:
    """(qkv, cos, sin, slots, a cache of NaN with row 0 zero)."""
    draw = torch.Generator().manual_seed(len(slots))
    kv_heads = shape.num_kv_heads * (1 if shape.k_eq_v else 2) if writes else 0
    columns = (shape.num_heads + kv_heads) * shape.head_dim
    qkv = torch.randn(len(slots), columns, generator=draw).to(device, dtype)
    positions = torch.arange(3, 3 + 7 * len(slots), 7)
    cos, sin = rope_table_reference(
        positions, mirrored(rope_frequencies(shape.head_dim, 1e4)), dtype
    )
    cache = None
    if writes:
        rows = max(*slots, 8) + 5
        cache = torch.full((rows, 2, shape.num_kv_heads, shape.head_dim), torch.nan).to(
            device, dtype
        )
        cache[0] = 0
    return qkv, cos.to(device), sin.to(device), torch.tensor(slots).to(device), cache


def check(
    shape: QkvShape,
    slots: list[int],
    dtype: torch.dtype,
    device: str,
) -> None:
    qkv, cos, sin, where, cache = inputs(shape, slots, dtype, device)
    assert cache is not None
    raw, other = qkv.clone(), cache.clone()
    expected = write_qkv_reference(Projection(qkv, cos, sin, where), other, shape)
    found = write_qkv_cuda(Projection(qkv, cos, sin, where), cache, shape)
    assert torch.equal(qkv, raw), "the projection is only read"
    torch.testing.assert_close(found, expected, **CLOSE[dtype])
    torch.testing.assert_close(cache, other, equal_nan=True, **CLOSE[dtype])
    written = sorted(slot for slot in slots if slot >= 0)
    assert (~cache.isnan()).flatten(1).all(1).nonzero().flatten().tolist() == sorted({0, *written})
    assert (cache[0] == 0).all() or 0 in slots


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("name", SHAPES)
def test_queries_and_cache_rows_are_the_references(name, dtype, device):
    check(drawn_shape(name, dtype, device), [7, -1, 3, 12, -1], dtype, device)
    check(drawn_shape(name, dtype, device), [2], dtype, device)


def test_the_reference_is_the_norm_the_rotation_and_the_copy():
    shape = drawn_shape("gemma", torch.float32, "cpu")
    qkv, cos, sin, slots, cache = inputs(shape, [4, 9], torch.float32, "cpu")
    q = write_qkv(Projection(qkv, cos, sin, slots), cache, shape)
    heads = qkv.view(2, 8, 16)
    assert torch.equal(q, apply_rope(rms_norm(heads[:, :4], shape.q_weight, EPS), cos, sin))
    keys = apply_rope(rms_norm(heads[:, 4:6], shape.k_weight, EPS), cos, sin)
    assert torch.equal(cache[[4, 9], 0], keys)
    assert torch.equal(cache[[4, 9], 1], rms_norm(heads[:, 6:], None, EPS))


@pytest.mark.parametrize("writes", [True, False], ids=["writes", "shares KV"])
@pytest.mark.parametrize("name", [name for name in SHAPES if SHAPES[name].num_heads])
def test_the_cpu_function_is_the_reference(name, writes):
    shape = drawn_shape(name, torch.float64, "cpu")
    if not writes:
        shape = dataclasses.replace(shape, k_weight=None)
    qkv, *table, cache = inputs(shape, [4, 9, 2], torch.float64, "cpu", writes=writes)
    other = None if cache is None else cache.clone()
    expected = write_qkv_reference(Projection(qkv.clone(), *table), cache, shape)
    projection = Projection(qkv, *table, has_padding=False)
    found = write_qkv(projection, other, with_gain(shape))
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    if cache is not None:
        torch.testing.assert_close(other, cache, rtol=1e-12, atol=1e-12, equal_nan=True)


@pytest.mark.gpu
def test_float64_on_a_device_is_the_reference():
    """Catches the CPU's function there, which overwrites the projection that others read."""
    shape = drawn_shape("gemma", torch.float64, "cuda")
    qkv, *table, cache = inputs(shape, [4, 9, 2], torch.float64, "cuda")
    raw, other = qkv.clone(), cache.clone()
    projection = Projection(qkv, *table, has_padding=False)
    found = write_qkv(projection, cache, with_gain(shape))
    assert torch.equal(found, write_qkv_reference(projection, other, shape))
    assert torch.equal(cache.nan_to_num(), other.nan_to_num())
    assert torch.equal(qkv, raw)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("run", [write_qkv_cuda, write_qkv_reference])
def test_values_that_are_keys_are_neither_weighted_nor_rotated(run, device):
    shape = drawn_shape("gemma k_eq_v", torch.float32, device)
    qkv, cos, sin, slots, cache = inputs(shape, [1, 6], torch.float32, device)
    run(Projection(qkv, cos, sin, slots), cache, shape)
    values = rms_norm(qkv.view(2, 8, 32)[:, 5:], None, EPS)
    torch.testing.assert_close(cache[[1, 6], 1], values, **CLOSE[torch.float32])
    assert not torch.allclose(cache[[1, 6], 0], values)


@pytest.mark.parametrize(("device", "dtype"), PLACES)
def test_a_layer_that_shares_kv_has_queries_only(dtype, device):
    shape = drawn_shape("gemma", dtype, device)
    qkv, cos, sin, slots, cache = inputs(shape, [5, -1, 2], dtype, device, writes=False)
    assert cache is None
    expected = write_qkv_reference(Projection(qkv, cos, sin, slots), None, shape)
    found = write_qkv_cuda(Projection(qkv, cos, sin, slots), None, shape)
    torch.testing.assert_close(found, expected, **CLOSE[dtype])


def check_against_float64(
    shape: QkvShape, slots: list[int], dtype: torch.dtype, device: str
) -> None:
    """Three roundings of terms no larger than |x cos| + |swapped x sin|, x the normed head."""
    draw = torch.Generator().manual_seed(1)
    q, k = (torch.randn(shape.head_dim, generator=draw).to(device, dtype) for _ in range(2))
    shape = dataclasses.replace(shape, q_weight=q, k_weight=k)
    qkv, cos, sin, where, cache = inputs(shape, slots, dtype, device)
    assert cache is not None
    found = write_qkv_cuda(Projection(qkv, cos, sin, where), cache, shape)
    wide = dataclasses.replace(shape, q_weight=q.double(), k_weight=k.double())
    exact_cache, bound_cache = cache.double(), cache.double()
    table = cos.double(), sin.double()
    exact = write_qkv_reference(Projection(qkv.double(), *table, where), exact_cache, wide)
    n, kv = shape.num_heads, shape.num_kv_heads
    heads = qkv.double().view(len(slots), -1, shape.head_dim)
    normed = heads.clone()
    normed[:, :n] = rms_norm(heads[:, :n], wide.q_weight, EPS)
    normed[:, n : n + kv] = rms_norm(heads[:, n : n + kv], wide.k_weight, EPS)
    plain = dataclasses.replace(shape, q_weight=None, k_weight=None, value_norm=False)
    sizes = normed.abs().flatten(1), table[0].abs(), table[1].abs()
    bound = write_qkv_reference(Projection(*sizes, where), bound_cache, plain)
    bound_cache[:, 1] = exact_cache[:, 1].abs()  # values are not rotated
    step = STEPS[dtype] * torch.finfo(dtype).eps
    least = torch.finfo(dtype).smallest_normal  # below it steps are no smaller
    assert ((found.double() - exact).abs() <= step * bound.clamp(min=least)).all()
    written = where[where >= 0]
    error = (cache[written].double() - exact_cache[written]).abs()
    assert (error <= step * bound_cache[written].clamp(min=least)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", ["gemma", "gemma k_eq_v"])
def test_kernel_is_near_float64(name, dtype):
    check_against_float64(SHAPES[name], [4, -1, 9], dtype, "cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 33, 700])
@pytest.mark.parametrize(
    "shape",
    [
        QkvShape(num_heads=8, num_kv_heads=2, head_dim=256, eps=EPS, value_norm=True),
        QkvShape(num_heads=8, num_kv_heads=2, head_dim=512, eps=EPS, value_norm=True),
        QkvShape(num_heads=32, num_kv_heads=4, head_dim=512, eps=EPS, value_norm=True, k_eq_v=True),
        QkvShape(num_heads=32, num_kv_heads=8, head_dim=128, eps=EPS),
        QkvShape(num_heads=9, num_kv_heads=3, head_dim=80, eps=EPS),
    ],
    ids=lambda s: f"{s.num_heads}-{s.num_kv_heads}-{s.head_dim}",
)
def test_model_sizes_are_near_float64(shape, rows, dtype):
    draw = torch.Generator().manual_seed(rows)
    slots = (1 + torch.randperm(4 * rows, generator=draw)[:rows]).tolist()
    if rows > 1:
        slots[rows // 2] = -1
    check_against_float64(shape, slots, dtype, "cuda")


@pytest.mark.gpu
def test_a_cache_of_more_than_two_gigabytes_is_addressed():
    shape = QkvShape(num_heads=1, num_kv_heads=2, head_dim=256, eps=EPS)
    rows = 2**31 // (4 * 256) + 64
    cache = torch.zeros(rows, 2, 2, 256, dtype=torch.bfloat16, device="cuda")
    qkv = torch.randn(1, 5 * 256, device="cuda").bfloat16()
    table = rope_table(
        torch.tensor([3], device="cuda"),
        mirrored(rope_frequencies(256, 1e4).to("cuda")),
        torch.bfloat16,
    )
    slots = torch.tensor([rows - 1], device="cuda")
    write_qkv_cuda(Projection(qkv, *table, slots), cache, shape)
    assert torch.equal(cache[-1, 1].flatten(), qkv[0, 3 * 256 :])
    assert not cache[:-1].any()


# Angles up to the largest position: the reference takes them in float32 too, so only the sine and
# cosine themselves may differ, by two units in the last place; bfloat16 by one step near a tie.
TABLE_CLOSE = {torch.float32: 3e-7, torch.float16: 2**-11, torch.bfloat16: 2**-8}


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize(("size", "share"), [(8, 1.0), (80, 1.0), (512, 0.25)])
def test_rope_table_kernel_is_its_reference(size, share, dtype, device):
    theta = rope_frequencies(size, 1e6, share)
    positions = torch.tensor([0, 1, 5, 4097, 131071])
    expected = rope_table_reference(positions, mirrored(theta), dtype)
    found = rope_table_cuda(positions.to(device), theta.to(device), dtype)
    for a, b in zip(found, expected, strict=True):
        assert a.shape == (5, 1, size)
        torch.testing.assert_close(a.to("cpu"), b, rtol=0, atol=TABLE_CLOSE[dtype])


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize(("heads", "size"), [(1, 8), (5, 24), (3, 130)])
def test_apply_rope_kernel_turns_views_in_place(heads, size, dtype, device):
    draw = torch.Generator().manual_seed(2)
    positions = torch.tensor([2, 0, 900, 31])
    table = rope_table_reference(positions, mirrored(rope_frequencies(size, 1e4)), dtype)
    cos, sin = (part.to(device) for part in table)
    whole = torch.randn(4, heads, size + 6, generator=draw).to(device, dtype)
    expected = whole.clone()
    apply_rope_reference(expected[..., 6:], cos, sin)
    view = whole[..., 6:]
    assert apply_rope_cuda(view, cos, sin) is view
    torch.testing.assert_close(whole, expected, **CLOSE[dtype])
