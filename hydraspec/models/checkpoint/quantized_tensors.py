"""Compares a checkpoint's quantised tensors with its config: each matrix with its scales, each
scale with its matrix, or one message that lists what does not fit.

Only headers are read, and the two numbers of a packed matrix's weight_shape. The loader checks the
values of scales.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path

from hydraspec_kernels.quantised import PER_INT32
from safetensors import safe_open

from hydraspec.errors import CheckpointError
from hydraspec.models.checkpoint.quantization import Scheme, tensor_name
from hydraspec.models.checkpoint.quantization_config import Schemes, found_formats, read_schemes
from hydraspec.models.checkpoint.reader import Checkpoint, TensorEntry, listed
from hydraspec.models.checkpoint.tensors import FLOATS, KV_SCALE

_DATA = ("weight", "weight_packed")
_STACKED = re.compile(r"(.*\.experts\.(?:gate_up_proj|down_proj))(?:_(.+))?\Z")
_STACKED_PARTS = {None: "weight", "scale_inv": "weight_scale_inv"}
_STACKED_PARTS |= {"activation_scale": "activation_scale"}
_SCALES = ("weight_scale", "weight_scale_inv", "input_scale", "activation_scale", "weight_shape")
_KINDS = {("weight", "F8_E4M3"): "fp8", ("weight_packed", "I32"): "int4"}
_REFUSED = {  # names that announce what is not computed
    "weight_zero_point": "zero points (asymmetric numbers)",
    "weight_g_idx": "columns in another order (actorder)",
    "weight_global_scale": "a second scale (NVFP4)",
    "weight_scale_2": "a second scale (NVFP4)",
    "input_global_scale": "a second scale of inputs (NVFP4)",
    "input_zero_point": "zero points of inputs",
    "qweight": "packed numbers of AWQ or GPTQ",
    "qzeros": "zero points of AWQ or GPTQ",
    "scales": "scales of AWQ or GPTQ",
    "g_idx": "columns in another order (GPTQ)",
}


@dataclass(slots=True)
class _Module:
    """The tensors of a matrix by their names after the module's; a stack of experts by the names
    that one matrix would have."""

    is_stacked: bool = False
    tensors: dict[str, TensorEntry] = field(default_factory=dict)

    def name(self, module: str, part: str) -> str:
        """Name of a tensor in the file."""
        return tensor_name(module, part, stacked=self.is_stacked)

    @property
    def data(self) -> str | None:
        """Name of the tensor of numbers, or None."""
        return next((name for name in reversed(_DATA) if name in self.tensors), None)

    @property
    def is_float(self) -> bool:
        """Returns whether the matrix is stored in a float type."""
        return self.data == "weight" and self.tensors["weight"].dtype in FLOATS


def schemes_of(checkpoint: Checkpoint) -> dict[str, Scheme]:
    """The scheme of every quantised matrix by its module's name among `checkpoint.entries()`; a
    stack of experts has the name of its tensor. Empty if all weights are float, whatever the config
    says (a drafter's may repeat its target's), and if it names no format: the loader then refuses
    numbers that are not float.

    Raises CheckpointError: a format that is not understood, or tensors that do not fit the config.
    """
    entries = checkpoint.entries()
    modules = _modules(entries)
    where = str(checkpoint.folder)
    marked = [name for name, module in modules.items() if _is_marked(module)]
    schemes = read_schemes(checkpoint.config, where) if marked else None
    if schemes is None:
        return {}
    problems: dict[str, list[str]] = defaultdict(list)
    shapes = _packed_shapes({name: modules[name] for name in marked})
    found = {}
    for name in marked:
        scheme = _checked(name, modules[name], schemes, shapes.get(name), problems)
        if scheme is not None:
            found[name] = scheme
    if problems:
        listing = "; ".join(f"{what}: {listed(names)}" for what, names in problems.items())
        raise CheckpointError(
            f"checkpoint {where!r} does not fit its quantization_config ({schemes.label}): "
            f"{listing}. Download it again, or mend its config"
        )
    return found


def _modules(entries: Mapping[str, TensorEntry]) -> dict[str, _Module]:
    """Tensors by module, those alone that may belong to a quantised matrix."""
    found: dict[str, _Module] = defaultdict(_Module)
    for name, entry in sorted(entries.items()):
        stacked = _STACKED.match(name)
        if stacked is not None and stacked[2] in _STACKED_PARTS:
            module = found[stacked[1]]
            module.is_stacked = True
            module.tensors[_STACKED_PARTS[stacked[2]]] = entry
            continue
        stem, _, last = name.rpartition(".")
        is_named = last in _DATA or last in _SCALES or last in _REFUSED
        if (is_named or entry.dtype.startswith("F8")) and KV_SCALE.search(name) is None:
            found[stem].tensors[last] = entry
    return found


def _is_marked(module: _Module) -> bool:
    """Returns whether a module has a sign of quantisation: a scale, or data that are not float."""
    return not module.is_float or len(module.tensors) > 1


def _packed_shapes(modules: Mapping[str, _Module]) -> dict[str, tuple[int, ...]]:
    """The shapes that packed matrices had before they were packed, as their files say."""
    by_file: dict[Path, list[tuple[str, str]]] = defaultdict(list)
    for name, module in modules.items():
        entry = module.tensors.get("weight_shape")
        if entry is not None and entry.shape == (2,) and entry.dtype in ("I32", "I64"):
            by_file[entry.file].append((name, entry.name))
    found = {}
    for file, names in by_file.items():
        with safe_open(file, framework="pt") as opened:
            for name, tensor in names:
                found[name] = tuple(map(int, opened.get_tensor(tensor)))
    return found


def _checked(
    name: str,
    module: _Module,
    schemes: Schemes,
    packed_from: tuple[int, ...] | None,
    problems: dict[str, list[str]],
) -> Scheme | None:
    """The scheme of a module with quantised tensors; None, and an entry in `problems`, if they do
    not fit the config."""
    what = _objection(name, module)
    if what is not None:
        problems[what].extend(module.name(name, part) for part in module.tensors)
        return None
    data = module.tensors[module.data or ""]
    kind = _KINDS.get((module.data or "", data.dtype))
    ignored, scheme = schemes.ignored.of(name), schemes.of(name)
    if kind is None:
        what = "numbers that are not read (those of F8_E4M3 are, and I32 with int4 in them)"
        problems[what].append(f"{module.name(name, module.data or '')} ({data.dtype})")
    elif ignored is not None:
        problems["quantised, though the config excludes them"].append(f"{name} (by {ignored!r})")
    elif scheme is None:
        problems["quantised, though the config names no format for them"].append(name)
    elif scheme.kind != kind:
        problems[f"{kind} numbers where the config says {scheme.kind}"].append(name)
    else:
        return _measured(name, module, scheme, packed_from, problems)
    return None


def _objection(name: str, module: _Module) -> str | None:
    """What no config could explain about a module's tensors, or None."""
    for part in module.tensors:
        if part in _REFUSED:
            return f"{_REFUSED[part]}, which are not computed"
    if module.data is None:
        return "scales without a matrix"
    if module.is_float:
        return "scales beside a float weight"
    dims = 3 if module.is_stacked else 2
    if len(module.tensors[module.data].shape) != dims or not prod(
        module.tensors[module.data].shape
    ):
        return "quantised tensors that are no matrix"
    return None


def _measured(
    name: str,
    module: _Module,
    scheme: Scheme,
    packed_from: tuple[int, ...] | None,
    problems: dict[str, list[str]],
) -> Scheme | None:
    """The scheme of a module whose tensors have the shapes that it gives them."""
    tensors = module.tensors
    *experts, rows, columns = tensors[scheme.data].shape
    if scheme.kind == "int4" and packed_from is not None:
        if packed_from[0] != rows or -(-packed_from[1] // PER_INT32) != columns:
            found = f"{name} holds {[rows, columns]}, weight_shape is {list(packed_from)}"
            problems["packed numbers of another shape"].append(found)
            return None
        columns = packed_from[1]
    if module.is_stacked:
        halves = name.endswith("gate_up_proj") and scheme.grid(rows, columns)[0] == 1
        scheme = replace(scheme, stacked=True, rows=rows // 2 if halves else scheme.rows)
    wanted = scheme.shapes(rows, columns, *experts)
    before = sum(map(len, problems.values()))
    for part in sorted(wanted.keys() - tensors.keys()):
        problems["missing"].append(module.name(name, part))
    for part in sorted(tensors.keys() - wanted.keys()):
        problems["scales that the config does not announce"].append(module.name(name, part))
    for part in sorted(wanted.keys() & tensors.keys() - {scheme.data}):
        entry, shape, full = tensors[part], wanted[part], module.name(name, part)
        if part != "weight_shape" and entry.dtype not in FLOATS:
            problems["scales that are no float numbers"].append(f"{full} ({entry.dtype})")
        elif entry.shape != shape and not prod(entry.shape) == prod(shape) == 1:
            found = f"{full} is {list(entry.shape)}, the config makes it {list(shape)}"
            problems["misshapen"].append(found)
    return scheme if sum(map(len, problems.values())) == before else None


def check_elsewhere(checkpoint: Checkpoint) -> None:
    """Checks a folder that another engine reads, if its format is understood here.

    Raises CheckpointError: tensors that do not fit the config, at which other engines fail with
    errors of their products, or not at all.
    """
    try:
        understood = read_schemes(checkpoint.config, str(checkpoint.folder))
    except CheckpointError:
        return
    if understood is not None:
        schemes_of(checkpoint)


def read_elsewhere(checkpoint: Checkpoint) -> Mapping[str, str] | None:
    """What `describe` says of a folder that another engine reads; a format that is not understood
    here goes by the name of its method."""
    values = found_formats(checkpoint.config, str(checkpoint.folder))
    if values is None:
        return None
    try:
        return describe(schemes_of(checkpoint))
    except CheckpointError:
        return {"matrices": str(values.get("quant_method"))}


def describe(schemes: Mapping[str, Scheme]) -> dict[str, str] | None:
    """What the matrices of each kind (the last part of a module's name, such as q_proj; experts)
    are stored as; None if nothing is quantised. Kinds that are not listed are float."""
    found: dict[str, set[str]] = defaultdict(set)
    for module, scheme in schemes.items():
        kind = "experts" if ".experts." in module else module.rpartition(".")[2]
        found[kind].add(str(scheme))
    return {kind: "; ".join(sorted(texts)) for kind, texts in sorted(found.items())} or None
