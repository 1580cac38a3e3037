"""The soft cap of logits in one pass: its kernel against the operators in float64, in Triton's
interpreter and on a GPU, and the linears that end with it.
"""

import pytest
import torch
from hydraspec_kernels import activation, linear
from hydraspec_kernels.activation import softcap_kernel
from hydraspec_kernels.activation.reference import soft_cap_reference_
from hydraspec_kernels.activation.softcap_kernel import BLOCK, soft_cap_cuda_
from hydraspec_kernels.linear.plan import MOST_ROWS
from kernel_places import DEVICES, PLACES
from torch import Tensor

# Of float32, in softcaps: exp and the division are off by two units in the last place each, the
# argument by one, and all of them by as much next to 0, where 1 is subtracted.
WIDE_ERROR = 2**-20
MARGIN = 5  # NaN before and after the logits
INF, NAN = torch.inf, torch.nan

# The interpreter's numpy says what a device does in silence: at a huge -x the result is -softcap.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
# Types narrow enough to try all their numbers; the interpreter truncates to bfloat16.
NARROW = [
    ("cpu", torch.float16),
    pytest.param("cuda", torch.float16, marks=pytest.mark.gpu),
    pytest.param("cuda", torch.bfloat16, marks=pytest.mark.gpu),
]


def check(found: Tensor, given: Tensor, softcap: float) -> None:
    """Once rounded to the type, beside the error of float32; NaN where NaN was given."""
    wanted = soft_cap_reference_(given.double(), softcap)
    bound = torch.finfo(found.dtype).eps / 2 * wanted.abs() + WIDE_ERROR * softcap
    is_near = (found.double() - wanted).abs() <= bound
    assert (is_near | (found.isnan() & given.isnan())).all()


def between(rows: int, columns: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor]:
    """Logits [rows, columns] up to some softcaps, and the memory around them, which holds NaN."""
    draw = torch.Generator().manual_seed(rows)
    memory = torch.full((2 * MARGIN + rows * columns,), NAN, dtype=dtype, device=device)
    logits = memory[MARGIN : MARGIN + rows * columns].view(rows, columns)
    logits.copy_(torch.randn(rows, columns, generator=draw) * 40)
    return logits, memory


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("softcap", [30.0, 0.7])
@pytest.mark.parametrize(
    ("rows", "columns"),
    [(1, 1), (3, 7), (2, BLOCK), (5, BLOCK + 1), (3, 2 * BLOCK - 16), (300, 10)],
)
def test_logits_are_capped_in_place_and_nothing_beside_them(
    rows: int, columns: int, softcap: float, device: str, dtype: torch.dtype
) -> None:
    """Odd sizes, at addresses that 16 bytes do not divide."""
    logits, memory = between(rows, columns, dtype, device)
    given = logits.clone()
    assert soft_cap_cuda_(logits, softcap) is logits
    check(logits, given, softcap)
    assert memory[:MARGIN].isnan().all()
    assert memory[-MARGIN:].isnan().all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("shape", [(0, 7), (3, 0), (7,), (2, 3, 5)], ids=str)
def test_other_shapes(shape: tuple[int, ...], device: str) -> None:
    given = torch.arange(torch.Size(shape).numel(), device=device).view(shape) - 3.0
    check(soft_cap_cuda_(given.clone(), 2.0), given, 2.0)


@pytest.mark.parametrize(("device", "dtype"), PLACES)
@pytest.mark.parametrize("softcap", [30.0, 0.7])
def test_odd_logits(softcap: float, device: str, dtype: torch.dtype) -> None:
    """Catches a cap that turns NaN into a number, or infinity into NaN."""
    most, least = torch.finfo(dtype).max, torch.finfo(dtype).tiny
    odd = [0.0, least, least / 4, 1e-4, softcap, 20 * softcap, 100 * softcap, most / 2, most, INF]
    given = torch.tensor([[NAN, *odd], [NAN, *(-value for value in odd)]]).to(device, dtype)
    found = soft_cap_cuda_(given.clone(), softcap)
    check(found, given, softcap)
    assert found[:, 0].isnan().all()
    assert found[:, 1].eq(0).all()
    assert not found[:, 1:].isnan().any()
    cap = torch.tensor(softcap, dtype=dtype)
    assert found[:, -5:].eq(torch.stack([cap, -cap]).to(device)[:, None]).all()


@pytest.mark.parametrize(("device", "dtype"), NARROW)
@pytest.mark.parametrize("softcap", [30.0, 0.7])
def test_no_logit_overtakes_another(softcap: float, device: str, dtype: torch.dtype) -> None:
    """Of all numbers of the type: a greedy choice may become a tie, and no other choice."""
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)
    given = every[~every.isnan()].float().sort().values.to(device, dtype)
    found = soft_cap_cuda_(given.clone(), softcap)
    check(found, given, softcap)
    assert (found[1:] >= found[:-1]).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_linears_of_the_library_end_with_the_kernel_in_half_precision(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on CUDA; single and double precision keep the three operators."""
    calls = list[Tensor]()

    def counted(logits: Tensor, softcap: float) -> Tensor:
        calls.append(logits)
        return soft_cap_cuda_(logits, softcap)

    for module in (activation, linear):
        monkeypatch.setattr(module, "runs_kernels", lambda x: True)
    monkeypatch.setattr(softcap_kernel, "soft_cap_cuda_", counted)
    rows = MOST_ROWS + 2
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(rows, 64, generator=draw).to(dtype)
    weight = torch.randn(75, 64, generator=draw).to(dtype).t()
    found = linear.linear(x, weight, softcap=3.0)
    is_half = dtype.itemsize == 2
    assert [logits is found for logits in calls] == [True] * is_half
    apply = soft_cap_cuda_ if is_half else soft_cap_reference_
    assert found.equal(apply(torch.mm(x, weight), 3.0))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("rows", "columns"), [(129, 262144), (512, 32000), (300, 4099)])
def test_on_the_gpu_linears_of_many_rows_round_the_cap_once(
    rows: int, columns: int, dtype: torch.dtype
) -> None:
    draw = torch.Generator("cuda").manual_seed(rows)
    x = torch.randn(rows, 256, generator=draw, device="cuda").to(dtype)
    weight = torch.randn(columns, 256, generator=draw, device="cuda").to(dtype).t()
    check(linear.linear(x, weight, softcap=30.0), torch.mm(x, weight), 30.0)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 40, 100, 200])
def test_on_the_gpu_no_linear_makes_a_number_of_nan(rows: int) -> None:
    """Catches logits that are not finite and go unseen: for a plain kernel, a warp-specialised one
    and the library."""
    draw = torch.Generator("cuda").manual_seed(rows)
    x = torch.randn(rows, 256, generator=draw, device="cuda").bfloat16()
    x[-1] = NAN
    weight = torch.randn(9216, 256, generator=draw, device="cuda").bfloat16().t()
    found = linear.linear(x, weight, softcap=30.0)
    assert found[-1].isnan().all()
    assert found[:-1].isfinite().all()


@pytest.mark.gpu
def test_on_the_gpu_more_logits_than_32_bits_count() -> None:
    """Catches offsets that wrap around: the last row would stay as it was, or be written beside."""
    columns = 1 << 18
    logits = torch.full(
        ((1 << 31) // columns + 1, columns), 40.0, dtype=torch.bfloat16, device="cuda"
    )
    given = logits[:1].clone()
    soft_cap_cuda_(logits, 30.0)
    check(logits[:1], given, 30.0)
    assert logits.eq(logits[0, 0]).all()
