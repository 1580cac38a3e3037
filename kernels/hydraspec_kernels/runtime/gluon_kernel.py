"""Building blocks of the Gluon kernels, which run on Hopper only and which no interpreter runs."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

# The copy by TMA has the first name since Triton 3.8; 3.9 no longer has the second one.
load_tile = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared


@gluon.jit
def _control(INSTRUCTION: gl.constexpr):
    """Issues a PTX instruction without operands."""
    gl.inline_asm_elementwise(INSTRUCTION, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def start_next(PDL: gl.constexpr):
    """Lets the next kernel start; see `launch_kernel`."""
    if PDL:
        _control("griddepcontrol.launch_dependents; // dummy $0")


@gluon.jit
def wait_for_inputs(PDL: gl.constexpr):
    """Waits until all earlier kernels have ended and their writes can be read."""
    if PDL:
        _control("griddepcontrol.wait; // dummy $0")


if hasattr(gl.shared_memory_descriptor, "reinterpret"):  # public since Triton 3.9

    @gluon.jit
    def view_tiles(
        memory, COUNT: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr
    ):
        """Shared `memory` seen as COUNT tiles [ROWS, WIDTH], without a copy."""
        return memory.reinterpret(memory.dtype, [COUNT, ROWS, WIDTH], LAYOUT)

else:

    @gluon.jit
    def view_tiles(
        memory, COUNT: gl.constexpr, ROWS: gl.constexpr, WIDTH: gl.constexpr, LAYOUT: gl.constexpr
    ):
        """Shared `memory` seen as COUNT tiles [ROWS, WIDTH], without a copy."""
        return memory._reinterpret(memory.dtype, [COUNT, ROWS, WIDTH], LAYOUT)
