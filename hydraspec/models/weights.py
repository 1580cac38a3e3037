"""Fills a model's empty weights: from a checkpoint, or at random in the same shapes."""

from __future__ import annotations

import math
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from hydraspec.errors import CheckpointError, ConfigurationError
from hydraspec.models.checkpoint.quantization import Scheme
from hydraspec.models.checkpoint.quantization_config import KEY, read_schemes
from hydraspec.models.checkpoint.quantized_tensors import describe, schemes_of
from hydraspec.models.checkpoint.reader import Checkpoint, listed
from hydraspec.models.checkpoint.tensors import BOUNDS, load_tensors
from hydraspec.models.moe import one_by_one
from hydraspec.models.parts import Part, Tensors, Weight, Weights, held

RANDOM_BOUND = 8.0  # of clipped maps: few activations of order one reach it
_SINGLE_EXPERT = re.compile(r"\.experts\.\d+\.")
_FILE_PREFIXES = ("model.", "model.language_model.", "")  # before the names of a model in files
EMPTY = "empty"  # for a model that only lends names and shapes, on torch's meta device


def fill(model: Weights, checkpoint: Checkpoint, *, weights: str, seed: int) -> None:
    """Fills every tensor of an empty model. weights is "checkpoint" or "random"."""
    if weights not in ("random", "checkpoint"):
        raise ConfigurationError(f"weights is {weights!r}; expected 'checkpoint' or 'random'")
    where = str(checkpoint.folder)
    if checkpoint.is_quantised:
        notes: tuple[str, ...] = ()
        if weights == "random":
            schemes = _schemes_by_config(checkpoint, model)
        else:
            stored = schemes_of(checkpoint)
            schemes = _named_as_in_model(stored, model)
            notes = _kept_in_float(checkpoint, model, schemes) if stored else (_all_float(where),)
        _allocate(model, schemes, where)
        stated = read_schemes(checkpoint.config, where) if schemes else None
        model.quantization_notes = notes
        if stated is not None:
            model.kv_cache_note = stated.kv_note
    if weights == "random":
        _randomise_model(model, seed)
    else:
        load_tensors(
            checkpoint, _named_as_in(checkpoint, model), model.canonical_name, model.ignores
        )
    if checkpoint.is_quantised:
        for prefix, part in model.matrices():
            part.finish_quantised(where, prefix)


def outline(model: Weights, checkpoint: Checkpoint) -> None:
    """Gives the linear maps of an empty model the formats of a quantised checkpoint: those of its
    files, by their headers, or those that its config names if it has none. Raises as `fill`."""
    if any(checkpoint.folder.glob("*.safetensors")):
        schemes = _named_as_in_model(schemes_of(checkpoint), model)
    else:
        schemes = _schemes_by_config(checkpoint, model)
    _allocate(model, schemes, str(checkpoint.folder))


def _allocate(model: Weights, schemes: Mapping[str, Scheme], where: str) -> None:
    """Makes the memory of every linear map, from schemes by the modules' names in the model. Raises
    CheckpointError for a scheme of a module that is neither a linear map nor an expert."""
    rest = dict(schemes)
    for prefix, part in model.matrices():
        names = (name for name in part.projection_names if prefix + name in schemes)
        try:
            part.allocate({name: rest.pop(prefix + name) for name in names})
        except CheckpointError as error:
            raise CheckpointError(f"checkpoint {where!r}, {prefix.rstrip('.')}: {error}") from None
    model.quantization = describe(schemes)
    if rest:
        raise CheckpointError(
            f"checkpoint {where!r}: {listed(sorted(rest))} cannot be read quantised; expected "
            "quantised linear maps and experts only: take a release that leaves tables "
            "(embed_tokens, lm_head) in float"
        )


def _named_as_in_model(schemes: Mapping[str, Scheme], model: Weights) -> dict[str, Scheme]:
    """The schemes of a checkpoint's modules by their names in the model. Settings name modules as
    files do, so that names are changed last."""
    found = {}
    for module, scheme in schemes.items():
        name = model.canonical_name(f"{module}.weight")
        if name is not None and not model.ignores(name):
            found[name.removesuffix(".weight")] = scheme
    return found


def _kept_in_float(
    checkpoint: Checkpoint, model: Weights, schemes: Mapping[str, Scheme]
) -> tuple[str, ...]:
    """A note on the linear maps for which the config names a format, and that are stored in float;
    none if there are no such maps."""
    stated = read_schemes(checkpoint.config, str(checkpoint.folder))
    assert stated is not None, "the checkpoint is quantised"
    matrices = model.matrices()
    maps = {prefix + name for prefix, part in matrices for name in part.projection_names}
    found = []
    for tensor in checkpoint.entries():
        module, _, last = tensor.rpartition(".")
        if last == "weight" and stated.of(module) is not None:
            name = (model.canonical_name(tensor) or "").removesuffix(".weight")
            if name in maps and name not in schemes:
                found.append(module)
    if not found:
        return ()
    return (
        f"{KEY} of {str(checkpoint.folder)!r} names a format for {listed(sorted(found))}, and the "
        "files hold these in float: they are computed in float; if that is meant, its list of "
        "ignored modules lacks them, or spells them otherwise",
    )


def _all_float(where: str) -> str:
    return f"{KEY} of {where!r} is not applied: all weights of its files are float"


def _schemes_by_config(checkpoint: Checkpoint, model: Weights) -> dict[str, Scheme]:
    """The schemes that config.json gives the model's linear maps, for random weights."""
    schemes = read_schemes(checkpoint.config, str(checkpoint.folder))
    assert schemes is not None, "the checkpoint is quantised"
    found = {}
    for prefix, part in model.matrices():
        for name in (prefix + each for each in part.projection_names):
            stated = [schemes.of(before + name) for before in _FILE_PREFIXES]
            if stated[0] is not None and None not in stated:
                found[name] = stated[0]
    return found


def _randomise_model(model: Weights, seed: int) -> None:
    """Seeded weights. Quantised ones are drawn in float, one at a time, and quantised as a
    checkpoint's maker does."""
    quantised: set[str] = set()
    for prefix, part in model.matrices():
        for each in part.projections():
            quantised |= {prefix + name for name in each.tensors()}
            if each.data.is_meta:
                continue
            sizes, device = (each.outputs.size, each.inputs.size), each.data.device
            whole = torch.empty(sizes, dtype=part.place.dtype, device=device)
            name = f"{prefix}{each.name}.weight"
            _draw(name, whole, zlib.crc32(f"{seed} {name}".encode()))
            each.draw(whole)
    randomise({n: weight for n, weight in model.tensors().items() if n not in quantised}, seed)


def _named_as_in(checkpoint: Checkpoint, model: Weights) -> Tensors:
    """The model's weights, with a name for each expert where the files have one."""
    tensors = model.tensors()
    is_packed = any(name.endswith("experts.down_proj") for name in tensors)
    if is_packed and any(_SINGLE_EXPERT.search(name) for name in checkpoint.entries()):
        return one_by_one(tensors)
    return tensors


def randomise(tensors: Mapping[str, Weight], seed: int) -> None:
    """Seeded weights that keep activations and attention scores of order one.

    Matrices are scaled by fan-in; norms and scalars are 1, but query and key norms give scores a
    deviation of 2; biases are 0. A part is cut from the whole tensor as a single process draws it,
    one at a time. Tensors of other pipeline stages (without memory) are left out.
    """
    for name, own_seed in _seeds(tensors, seed):
        weight = tensors[name]
        if held(weight).is_meta:
            continue
        if isinstance(weight, Part) and weight.tensor.dim() > 1:
            whole = weight.empty_whole()
            _draw(name, whole, own_seed)
            weight.tensor.copy_(weight.read(whole.__getitem__))
        else:
            _draw(name, held(weight), own_seed)


def drawn_whole(
    tensors: Mapping[str, Tensor], seed: int, device: torch.device
) -> Iterator[tuple[str, Tensor]]:
    """Each weight by name, whole and on `device`, with the numbers that `randomise` fills it with.

    `tensors` only lend shapes and types, so that they may be on torch's meta device. One weight
    exists at a time unless the caller keeps it.
    """
    for name, own_seed in _seeds(tensors, seed):
        whole = torch.empty(tensors[name].shape, dtype=tensors[name].dtype, device=device)
        _draw(name, whole, own_seed)
        yield name, whole


def _seeds(names: Iterable[str], seed: int) -> Iterator[tuple[str, int]]:
    """Names in the order of drawing, each with the seed of its separate generator."""
    return ((name, seed * 1_000_003 + offset) for offset, name in enumerate(sorted(names)))


def _draw(name: str, tensor: Tensor, seed: int) -> None:
    """Fills a whole weight with initial values, drawn in its own order of strides."""
    generator = torch.Generator(tensor.device).manual_seed(seed)
    if name.endswith("token_ordering"):
        tensor.copy_(torch.randperm(len(tensor), generator=generator, device=tensor.device))
    elif name.endswith(("q_norm.weight", "k_norm.weight")):
        tensor.fill_(math.sqrt(2.0) * tensor.numel() ** -0.25)
    elif name.endswith(BOUNDS):
        tensor.fill_(-RANDOM_BOUND if name.endswith("_min") else RANDOM_BOUND)
    elif tensor.dim() < 2:
        tensor.fill_(0.0 if name.endswith(".bias") else 1.0)
    else:
        tensor.normal_(0.0, tensor.shape[-1] ** -0.5, generator=generator)
