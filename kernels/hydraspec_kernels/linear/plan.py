"""The tiling of a linear of few rows, from its shape alone; measured on one H200.

Tensor cores win from the first row on, because they leave the threads free to keep loads in flight.
Speed depends on every multiprocessor having the same share, in one wave or many, with over 100 KB
in flight. Small weights never fill the device: there a short chain of dependent steps wins. The
more rows, the more x costs: from 33 on, for some shapes from 17, wide tiles with a dedicated
copying warp are best (`SpecializedTiling`), which also overlap with the previous and the next
kernel; a few shapes stay with the library.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor, bfloat16, float16, float32

from hydraspec_kernels.runtime.launch import NUM_SMS, is_hopper

GATED = ("gelu_tanh", "silu")

MOST_ROWS = 128
SHARED_BYTES = 225 << 10  # of a multiprocessor, for the tiles of one program
COPIED_BYTES = 226 << 10  # the same with a copying warp, less its barriers
SMALL_WEIGHT_BYTES = 4 << 20
MOST_EXACT_ROWS = 64  # of float32
MOST_EXACT_PRODUCTS = 4_000_000  # of float32: multiplications of a linear
SHORT_K = 512
SPLIT_K = 8192  # from here on splitting K among wide tiles pays
SHORT_SPLIT_K = 2048  # SPLIT_K at 33 to 64 rows, for outputs of up to 4096 columns
LONG_K = 16384  # SPLIT_K at 65 to 128 rows, for outputs of more columns; of a drafter's features


@dataclass(frozen=True, slots=True)
class Tiling:
    """A specialisation of the plain kernels and its grid."""

    dots: bool  # tensor cores, or CUDA cores
    m: int  # rows of x a program holds
    rows: int  # rows of the weight's [N, K] storage a program owns
    k: int  # columns of a step, or of each slice
    splits: int = 1  # programs that share K
    slices: int = 1  # warps of a program that share K (dots only)
    stages: int = 4  # steps in flight (dots only)
    warps: int = 4
    prefetch: int = 0  # steps brought into the L2 before the inputs are complete: 0, 1, 2, 4

    @property
    def step(self) -> int:
        """Columns of K in one step of a program."""
        return self.k * self.slices

    def columns(self, gated: bool) -> int:
        """Number of columns of the output that a program writes."""
        return self.rows // 2 if gated else self.rows


@dataclass(frozen=True, slots=True)
class SpecializedTiling:
    """A specialisation of the warp-specialised kernel, in which one warp only copies."""

    m: int  # rows of x a program holds: 64 or 128
    columns: tuple[int, ...]  # of the output, per product, up to three; gated: of gate and of up
    splits: int = 1  # programs that share K
    stages: int = 4  # steps in flight
    k: int = 64  # columns of x in a step
    most: int = NUM_SMS  # programs along the columns; they loop over more columns than that
    registers: int | None = None  # of a thread, on average; None: no limit

    @property
    def step(self) -> int:
        """Columns of K in one step of a program."""
        return self.k

    def shared_bytes(self, gated: bool) -> int:
        """Bytes of the tiles in flight."""
        rows = self.m + sum(self.columns) * (2 if gated else 1)
        return 2 * rows * self.k * self.stages


def tiling_for(
    x: Tensor, weight: Tensor, end: str = "", *, partials: bool = False
) -> Tiling | SpecializedTiling | None:
    """The tiling of x [T, K] @ weight [K, N], N being 2I for a gated `end`; None: the library.

    Unmeasured inputs give None too: no rows, and strides other than of a [K, N] view of [N, K].
    """
    plain = x.stride(-1) == 1 and weight.stride(0) == 1 and x.dtype == weight.dtype
    if plain and x.dtype is float32:
        return exact_tiling_of(x.shape[0], *weight.shape)
    if not plain or x.dtype not in (bfloat16, float16):
        return None
    copied = is_hopper(x.device) and all(
        a.data_ptr() % 16 == 0 and stride % 8 == 0
        for a, stride in ((x, x.stride(0)), (weight, weight.stride(1)))
    )
    return tiling_of(x.shape[0], *weight.shape, end, partials=partials, copied=copied)


def exact_tiling_of(rows: int, k: int, n: int) -> Tiling | None:
    """The tiling of float32, which tensor cores do not multiply exactly: on the CUDA cores, where
    the products are so few that a program per row costs nothing.

    The library takes 26 to 55 us for most such products of 8 to 16 rows, the kernel 1 to 6.
    """
    if 0 < rows <= MOST_EXACT_ROWS and rows * k * n <= MOST_EXACT_PRODUCTS:
        return _one_row(k)
    return None


def tiling_of(
    rows: int, k: int, n: int, end: str = "", *, partials: bool = False, copied: bool = True
) -> Tiling | SpecializedTiling | None:
    """The tiling for 16-bit x [rows, k] @ weight [k, n], with the same results as `tiling_for`.
    `copied` says that device and alignment allow a warp-specialised kernel."""
    if not 0 < rows <= MOST_ROWS:
        return None
    small = 2 * k * n < SMALL_WEIGHT_BYTES
    m = next(size for size in (16, 32, 64, 128) if rows <= size)
    if small:
        return _one_row(k) if rows == 1 else _small(m, k, end, partials)
    if copied and m > 16 and (specialized := _specialized(m, k, n, end, partials)):
        return specialized
    if m == 128:
        return _many_rows(k, n, end, partials)
    if partials:
        return _split(m, k, n)
    if n < 4096:  # too few tiles of 64 rows
        if m == 64:
            return None
        return _staged(Tiling(True, m, 32 if n >= 2880 else 16, 128, slices=4, prefetch=2), k, 5)
    return _wide(m, k, n, end)


def _staged(tiling: Tiling, k: int, most: int) -> Tiling:
    """The tiling with as many stages as the shared memory and K have room for."""
    room = SHARED_BYTES // (2 * (tiling.rows + tiling.m) * tiling.step)
    steps = -(-k // (tiling.splits * tiling.step))
    return replace(tiling, stages=max(2, min(most, room, steps + 1)))


def _one_row(k: int) -> Tiling:
    """The tiling of a single row and a small weight: all of it in registers at once if K allows."""
    block = min(max(1 << (k - 1).bit_length(), 128), 4096)
    return Tiling(False, 1, 8 if block <= 512 else 4 if block <= 1024 else 2, block)


def _small(m: int, k: int, end: str, partials: bool) -> Tiling:
    """The tiling of a small weight: many small programs, which also divide the rows of x."""
    if k <= SHORT_K:
        block = 128 if k <= 128 or end in GATED else 256
        rows = 32 if m == 16 else 64
        return Tiling(True, min(m, 64), rows, block, stages=2, prefetch=256 // block)
    if partials:
        return Tiling(True, min(m, 32), 8, 128, min(4, -(-k // 512)), slices=4, stages=5)
    return _staged(Tiling(True, 16, 8, 128, slices=4, prefetch=4 if k > 1536 else 2), k, 5)


def _split(m: int, k: int, n: int) -> Tiling:
    """The tiling of partial sums: 64 rows of the weight a program, and K split until the programs
    fill the device.
    """
    tiles = -(-n // 64)
    splits = NUM_SMS // tiles if 2 * tiles <= NUM_SMS else 2 * NUM_SMS // tiles
    splits = max(1, min(splits, 8, k // 256))
    if m == 64 and tiles > NUM_SMS // 2:
        return Tiling(True, m, 128, 128, splits, warps=8)
    most = 8 if tiles * splits <= NUM_SMS else 4
    return _staged(Tiling(True, m, 64, 128, splits, prefetch=2), k, most)


def _wide(m: int, k: int, n: int, end: str) -> Tiling | None:
    """The tiling with all of K in one program. Two programs fit on a multiprocessor with 4 stages,
    one with 8; the choice is the one with the shorter last wave.
    """
    pairs = -(-n // 128)  # programs of 128 rows, which read x half as often
    if m == 64 and pairs / (-(-pairs // NUM_SMS) * NUM_SMS) > 0.8:
        return Tiling(True, m, 128, 128, warps=8)
    if m == 64 and n > 8192 and end not in GATED:
        return None
    programs = -(-n // 64)
    even = 200 < programs <= 2 * NUM_SMS or programs > 4 * NUM_SMS
    return _staged(Tiling(True, m, 64, 128, prefetch=2), k, 4 if even else 8)


def _specialized(m: int, k: int, n: int, end: str, partials: bool) -> SpecializedTiling | None:
    """The tiling of 17 to 128 rows; None unless wide tiles with a copying warp are best."""
    if end == "scaled_gelu":
        return None
    if partials:
        return _specialized_split(m, k, n)
    if end in GATED:
        columns = _one_wave(n // 2)
        wanted = m > 32 or sum(columns) <= 80
        return _filled(m, columns, k, gated=True) if wanted and columns else None
    if end == "softcap":
        return _filled(m, (256,), k) if m == 128 and k < 4096 else None
    if m > 32 and n < 4096:  # too few columns for wide tiles: 128 rows in two blocks
        width = next((w for w in (16, 32) if n * m <= 64 * w * NUM_SMS), 64)
        return _filled(64, (width,), k, step=128)
    columns = _one_wave(n)
    if m == 64 and k >= LONG_K and n <= 8192:
        return _filled(m, columns, k, step=128)
    return _filled(m, columns, k) if m > 32 and n > 8192 and columns else None


def _specialized_split(m: int, k: int, n: int) -> SpecializedTiling | None:
    """The tiling of partial sums, K split until the programs fill the device; None if not best."""
    wide, least = n > 4096, SPLIT_K
    if m == 64 and not wide:
        least = SHORT_SPLIT_K
    if m == 128 and wide:
        least = LONG_K
    width = 128 if wide or m == 32 else 64
    splits = NUM_SMS // -(-n // width)
    if k < least or not 2 <= splits <= 8:
        return None
    return _filled(m, (width,), k, splits=splits, step=128 if m == 64 and not wide else 64)


def _one_wave(n: int) -> tuple[int, ...]:
    """Up to three powers of two: the columns of a program if one wave of programs divides n among
    them; () if these are too many for the registers.
    """
    least = max(-(-n // NUM_SMS), 16)
    for share in range(-(-least // 8) * 8, 177, 8):
        powers = tuple(size for size in (128, 64, 32, 16, 8) if share & size)
        if len(powers) <= 3:
            return powers
    return ()


def _filled(
    m: int,
    columns: tuple[int, ...],
    k: int,
    *,
    splits: int = 1,
    step: int = 64,
    gated: bool = False,
) -> SpecializedTiling:
    """The tiling with as many stages as fit the shared memory beside a program's output, and with
    registers left, where possible, for the previous or the next norm's programs to run alongside.
    """
    m = max(m, 64)
    wide = sum(columns) * (2 if gated else 1)
    room = COPIED_BYTES - min(2 * m * columns[0], 32 << 10)  # less the buffer of the output
    stages = min(room // (2 * (m + wide) * step), 8, -(-k // (splits * step)) + 1)
    registers = 128 if m == 64 else max(80, wide // 2 + 32)
    if columns[0] * (2 if gated else 1) > 128:  # one such product takes more
        return SpecializedTiling(m, columns, splits, stages, step)
    return SpecializedTiling(m, columns, splits, stages, step, registers=registers)


def _many_rows(k: int, n: int, end: str, partials: bool) -> Tiling | None:
    """The tiling of 65 to 128 rows, for which x costs as much as the weights; None: the library."""
    if partials and n <= 4096:
        return Tiling(True, 128, 64, 128, max(1, min(NUM_SMS // -(-n // 64), 3, k // 256)))
    if partials and k >= LONG_K:
        return Tiling(True, 128, 128, 64, max(1, NUM_SMS // -(-n // 128)), stages=6, warps=8)
    if end == "softcap":  # cheaper here than one more pass over the logits
        return Tiling(True, 128, 128, 64, stages=6, warps=8)
    return None
