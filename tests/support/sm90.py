"""Compiles kernels for sm_90 on a machine without a GPU, in a process where Triton does not
interpret: see `compiled_apart`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource


def build(
    kernel: Any,
    types: Mapping[str, str],
    fixed: Mapping[str, Any],
    aligned: Sequence[str] = (),
    *,
    source: type = GluonASTSource,
    **options: Any,
) -> Any:
    """A kernel compiled for arguments of these types, those of `aligned` multiples of 16, and these
    values of the others; None where neither says."""
    names = kernel.arg_names
    made = source(
        fn=kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs={(i,): fixed.get(name) for i, name in enumerate(names) if name not in types},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned},
    )
    return triton.compile(
        made, target=GPUTarget("cuda", 90, 32), options={"launch_pdl": True, **options}
    )


def weights(name: str, rows: Sequence[int], tile: str) -> tuple[dict[str, str], dict[str, int]]:
    """Types of a matrix that is copied in up to three tiles, whose arguments are name_0 and so on,
    and their rows R0 and so on; in `tile`, {} stands for the rows."""
    sizes = [*rows, 0, 0][:3]
    types = {f"{name}{i}": f"tensordesc<{tile.format(n)}>" for i, n in enumerate(sizes) if n}
    return types, {f"R{i}": n for i, n in enumerate(sizes)}
