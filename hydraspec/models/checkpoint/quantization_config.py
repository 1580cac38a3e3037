"""Reads what a config says of each module's number format, and refuses what is not computed.

Two spellings are understood: compressed-tensors' config_groups, into which `mistral_names` turns
Mistral's, and transformers' `quant_method: fp8`. `quantized_tensors` compares them with the files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from hydraspec.errors import CheckpointError
from hydraspec.models.checkpoint.config_reader import MAX_COUNT, ConfigReader, shown, text_part
from hydraspec.models.checkpoint.quantization import Scheme

KEY = "quantization_config"
OLD_KEY = "compression_config"  # compressed-tensors' name of the object in its first releases
REMEDY = (
    "understood are FP8 (e4m3) of compressed-tensors, transformers and Mistral, and symmetric int4 "
    "of compressed-tensors (W4A16): give such a release, or one in bfloat16"
)

T = TypeVar("T")
REGEX = "re:"  # before a pattern in compressed-tensors' lists
_SPECIAL = re.compile(r"[^\w.\-]")  # a character that makes a name a pattern
_CLASSES = ("Linear", "LinearBase")  # classes as which every matrix counts
_FORMATS = {"float-quantized": "fp8", "naive-quantized": "fp8", "pack-quantized": "int4"}
_ARGUMENTS = {  # compressed-tensors'; others would change what is computed
    *("num_bits", "type", "strategy", "symmetric", "dynamic", "group_size", "block_structure"),
    *("actorder", "scale_dtype", "zp_dtype", "observer", "observer_kwargs"),
}
_SCALE_TYPES = (None, "torch.float32", "torch.bfloat16", "torch.float16")
_NO_REORDERING = (None, False, "weight", "static")  # columns keep their order in the file
# What else compressed-tensors may announce, and the values without effect.
_NOT_COMPUTED: dict[str, tuple[object, ...]] = {
    "sparsity_config": (None, {}, {"format": "dense"}),
    "moe_sparsity_config": (None, {}),
    "transform_config": (None, {}, {"config_groups": {}}),
}


@dataclass(slots=True, frozen=True, kw_only=True)
class Modules(Generic[T]):
    """A value for each module that a config names: by name, by pattern, or by class."""

    names: Mapping[str, T] = field(default_factory=dict)
    patterns: tuple[tuple[re.Pattern[str], T], ...] = ()  # from the start of the name
    matrices: T | None = None  # what counts for every other matrix: the class Linear
    by_parts: bool = False  # a name also means the modules inside it, and those that end with it

    def of(self, module: str) -> T | None:
        """The value for a module; a name goes before a pattern, and both before a class."""
        for name in (module, *(_parts(module) if self.by_parts else ())):
            if name in self.names:
                return self.names[name]
        found = (value for pattern, value in self.patterns if pattern.match(module))
        return next(found, self.matrices)


def _parts(module: str) -> Iterator[str]:
    """Yields the module's outer modules by name, and the ends of its name."""
    for i, letter in enumerate(module):
        if letter == ".":
            yield module[:i]
            yield module[i + 1 :]


@dataclass(slots=True, frozen=True, kw_only=True)
class Schemes:
    """The formats of a checkpoint's matrices, as its config says.

    Attributes:
        label: method and format, for messages.
        ignored: modules that are not quantised, whatever `targets` say; as the config names them.
        kv_note: on a kv_cache_scheme, for caches in the model's type; empty: there is none.
    """

    label: str
    targets: Modules[Scheme]
    ignored: Modules[str] = Modules()
    kv_note: str = ""

    def of(self, module: str) -> Scheme | None:
        """The scheme of a matrix by its module's name in the file; None: it is not quantised. A
        float weight without a scale is not quantised either, whatever is said here."""
        return None if self.ignored.of(module) is not None else self.targets.of(module)


def read_schemes(config: Mapping[str, Any], where: str) -> Schemes | None:
    """The schemes of a raw config.json; None if it has no quantization_config.

    The object may stand at the top, in the text_config of a multimodal wrapper, or under
    compressed-tensors' first name for it. Raises CheckpointError for what is not computed here,
    naming key, value and what is understood.
    """
    values = found_formats(config, where)
    if values is None:
        return None
    keys = ConfigReader({}, where).part(KEY, values)
    method = values.get("quant_method")
    if method == "compressed-tensors" or (method is None and "config_groups" in values):
        return _compressed_tensors(keys, values)
    if method == "fp8":
        return _transformers_fp8(keys, values)
    raise _refusal(keys, "quant_method", "compressed-tensors or fp8")


def found_formats(config: Mapping[str, Any], where: str) -> Mapping[str, Any] | None:
    """The object that describes number formats, wherever it stands; None if there is none."""
    for part in (config, text_part(config)):
        for key in (KEY, OLD_KEY):
            values = part.get(key)
            if not values:
                continue
            if not isinstance(values, Mapping):
                raise ConfigReader({key: values}, where).fail(key, f"an object; {REMEDY}")
            inner = values.get(KEY)  # beside a sparsity_config, in old files
            if isinstance(inner, Mapping):
                return {"sparsity_config": values.get("sparsity_config")} | dict(inner)
            return values
    return None


def _refusal(keys: ConfigReader, key: str, expected: str, where: str = "") -> CheckpointError:
    """The error for the value of a key of the object, or of its part `where`."""
    return keys.fail(f"{KEY}.{where}{key}", f"{expected}; {REMEDY}")


# ------------------------------------------------------------------ compressed-tensors


def _compressed_tensors(keys: ConfigReader, values: Mapping[str, Any]) -> Schemes:
    for key, harmless in _NOT_COMPUTED.items():
        if values.get(key) not in harmless:
            raise _refusal(keys, key, "none")
    groups = values.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise _refusal(keys, "config_groups", "an object of groups with targets and weights")
    schemes: dict[str, Scheme] = {}  # of equal targets the last counts
    for name, group in groups.items():
        path = f"config_groups.{name}"
        if not isinstance(group, Mapping):
            inner = keys.part(f"{KEY}.config_groups", groups)
            raise _refusal(inner, path, "an object with targets and weights")
        targets = _texts(keys.where, f"{path}.targets", group.get("targets"))
        try:
            scheme = _group_scheme(keys, path, group, values.get("format"))
        except CheckpointError as error:
            raise CheckpointError(f"{error} (the group's modules: {shown(targets)})") from None
        schemes |= dict.fromkeys(targets, scheme)
    ignored = _texts(keys.where, "ignore", values.get("ignore") or [])
    kv_note = ""
    if values.get("kv_cache_scheme"):
        kv_note = (
            f"{KEY}.kv_cache_scheme of {keys.where!r} is not applied: keys and values are kept "
            "unrounded, in the target's type"
        )
    return Schemes(
        label=str(values.get("format") or "compressed-tensors"),
        targets=_modules(schemes, keys.where),
        ignored=_modules({text: text for text in ignored}, keys.where),
        kv_note=kv_note,
    )


def _group_scheme(
    keys: ConfigReader, path: str, group: Mapping[str, Any], default_format: object
) -> Scheme:
    """The scheme of a group of modules."""
    of_group = keys.part(f"{KEY}.{path}", group)
    if group.get("output_activations") is not None:
        raise _refusal(of_group, "output_activations", "null", f"{path}.")
    key, stated = "format", default_format
    if group.get("format"):
        key, stated = f"{path}.format", group["format"]
    if stated not in (None, "mixed-precision", *_FORMATS):
        raise _refusal(ConfigReader({f"{KEY}.{key}": stated}, keys.where), key, ", ".join(_FORMATS))
    weights = _arguments(of_group, path, "weights", group.get("weights"))
    inputs = group.get("input_activations")
    kind = _kind(weights, f"{path}.weights.", weights.values)
    if _FORMATS.get(str(stated), kind) != kind:
        raise _refusal(weights, "type", f"the type that {key} {stated} stores", f"{path}.weights.")
    rows, columns = _blocks(weights, f"{path}.weights.", kind)
    if kind == "int4":
        if inputs is not None:
            raise _refusal(of_group, "input_activations", "null for int4", f"{path}.")
        return Scheme(kind=kind, rows=rows, columns=columns, inputs="float")
    if inputs is None:
        return Scheme(kind=kind, rows=rows, columns=columns, inputs="float")
    how, size = _inputs(_arguments(of_group, path, "input_activations", inputs), path)
    return Scheme(
        kind=kind,
        rows=rows,
        columns=columns,
        inputs=how,
        group=size,
        input_scale="input_scale" if how == "static" else None,
    )


def _arguments(of_group: ConfigReader, path: str, part: str, values: object) -> ConfigReader:
    """A reader of a group's arguments for weights or inputs; keys that nobody knows are refused."""
    if not isinstance(values, Mapping):
        raise _refusal(of_group, part, "an object", f"{path}.")
    found = of_group.part(f"{KEY}.{path}.{part}", values)
    for key in values:
        if key not in _ARGUMENTS:
            raise _refusal(found, str(key), "no such key", f"{path}.{part}.")
    return found


def _kind(keys: ConfigReader, path: str, values: Mapping[str, Any]) -> Literal["fp8", "int4"]:
    """Number format of weights or inputs: symmetric e4m3 or int4 with scales in a float type."""

    def value(key: str) -> Any:
        return values.get(f"{KEY}.{path}{key}")

    kind, bits = str(value("type") or "int").lower(), value("num_bits")
    if (kind, bits) not in (("float", 8), ("int", 4)):
        raise _refusal(keys, "num_bits", f"8 with type float, or 4 with int (it is {kind})", path)
    if value("symmetric") is False:
        raise _refusal(keys, "symmetric", "true, numbers without zero points", path)
    if value("scale_dtype") not in _SCALE_TYPES:
        raise _refusal(keys, "scale_dtype", "torch.float32, bfloat16 or float16", path)
    if value("actorder") not in _NO_REORDERING:
        raise _refusal(keys, "actorder", "null, weight or static (no reordered columns)", path)
    return "fp8" if kind == "float" else "int4"


def _blocks(keys: ConfigReader, path: str, kind: str) -> tuple[int | None, int | None]:
    """Rows and columns of a matrix that share a scale."""
    where = f"{KEY}.{path}"
    if keys.get(f"{where}dynamic") not in (None, False):
        raise _refusal(keys, "dynamic", "false for weights", path)
    strategy = keys.get(f"{where}strategy")
    size = keys.get(f"{where}group_size")
    if strategy is None:  # as the library infers it
        strategy = "tensor" if size is None else "channel" if size == -1 else "group"
    if strategy == "channel":
        return 1, None
    if strategy == "tensor" and kind == "fp8":
        return None, None
    if strategy == "group" and kind == "int4":
        return 1, _size(keys, path)
    if strategy == "block" and kind == "fp8":
        return _pair(keys, f"{path}block_structure")
    allowed = "tensor, channel or block for fp8" if kind == "fp8" else "group or channel for int4"
    raise _refusal(keys, "strategy", allowed, path)


def _inputs(
    keys: ConfigReader, path: str
) -> tuple[Literal["token", "group", "static"], int | None]:
    """How rows are rounded, and the numbers of a group.

    A dynamic scale per tensor would tie a row's rounding to the rows beside it: it is taken per
    token, so that a row rounds alike in every batch.
    """
    path = f"{path}.input_activations."
    where = f"{KEY}.{path}"
    if _kind(keys, path, keys.values) != "fp8":
        raise _refusal(keys, "num_bits", "8 with type float for inputs", path)
    is_dynamic = keys.get(f"{where}dynamic") or False
    if is_dynamic not in (True, False):
        raise _refusal(keys, "dynamic", "true or false", path)
    strategy = keys.get(f"{where}strategy")
    if strategy is None:
        strategy = "tensor" if keys.get(f"{where}group_size") is None else "group"
    if is_dynamic and strategy in ("token", "tensor"):
        return "token", None
    if is_dynamic and strategy == "group":
        return "group", _size(keys, path)
    if not is_dynamic and strategy == "tensor":
        return "static", None
    allowed = "token, tensor or group if dynamic, tensor if static"
    raise _refusal(keys, "strategy", allowed, path)


def _modules(values: Mapping[str, T], where: str) -> Modules[T]:
    """The values of modules that compressed-tensors names: by class, by the pattern after `re:`,
    or by name."""
    patterns = sorted(text for text in values if text.startswith(REGEX))
    return Modules(
        names={text: value for text, value in values.items() if text not in _CLASSES},
        patterns=tuple(
            (_compiled(text.removeprefix(REGEX), text, where), values[text]) for text in patterns
        ),
        matrices=next((values[text] for text in _CLASSES if text in values), None),
    )


# ------------------------------------------------------------------ transformers


def _transformers_fp8(keys: ConfigReader, values: Mapping[str, Any]) -> Schemes:
    """The one scheme of transformers' finegrained fp8, which DeepSeek's releases share."""
    for key, allowed in (
        ("fmt", (None, "e4m3", "float8_e4m3fn")),
        ("scale_fmt", (None, "float")),  # ue8m0 rounds the scales of inputs to powers of two too
        ("expert_dtype", (None, "fp8")),
        ("modules_to_convert", (None, [])),
    ):
        if values.get(key) not in allowed:
            raise _refusal(keys, key, f"{allowed[-1] or 'none'}, or null")
    rows, columns = None, None
    block = values.get("weight_block_size", (128, 128))  # the library's default
    if block is not None:
        keys.values = {f"{KEY}.weight_block_size": block} | dict(keys.values)
        rows, columns = _pair(keys, "weight_block_size")
    activations = str(values.get("activation_scheme") or "dynamic").lower()
    if activations not in ("dynamic", "static"):
        raise _refusal(keys, "activation_scheme", "dynamic or static")
    is_static = activations == "static"
    scheme = Scheme(
        kind="fp8",
        rows=rows,
        columns=columns,
        inputs="static" if is_static else "token" if columns is None else "group",
        group=None if is_static else columns,
        scale="weight_scale_inv",
        input_scale="activation_scale" if is_static else None,
    )
    list_key = "modules_to_not_convert"
    if values.get(list_key) is None and values.get("ignored_layers") is not None:
        list_key = "ignored_layers"
    skipped = values.get(list_key)
    names = ["lm_head"] if skipped is None else _texts(keys.where, list_key, skipped)
    return Schemes(
        label="fp8",
        targets=Modules(matrices=scheme),
        ignored=_skipped(names, keys.where),
    )


def _skipped(texts: list[str], where: str) -> Modules[str]:
    """The modules that entries of modules_to_not_convert name: a name or a pattern of the start of
    the module's name, or the name's end, always whole parts between dots.

    transformers also takes parts of a part: there `mlp.gate` skips `mlp.gate_proj`, whose data are
    FP8 in the releases that list the router so.
    """
    patterns = [text for text in texts if _SPECIAL.search(text)]
    return Modules(
        names={text: text for text in texts},
        patterns=tuple(
            (_compiled(rf"(?:{text})(?:\.|\Z)", text, where), text) for text in patterns
        ),
        by_parts=True,
    )


# ------------------------------------------------------------------ values


def _size(keys: ConfigReader, path: str) -> int:
    """The group_size of weights or inputs."""
    value = keys.get(f"{KEY}.{path}group_size")
    if type(value) is not int or not 1 <= value <= MAX_COUNT:
        raise _refusal(keys, "group_size", f"an integer from 1 to {MAX_COUNT}", path)
    return value


def _pair(keys: ConfigReader, path: str) -> tuple[int, int]:
    """Two positive integers under a key, or a text such as 128x128."""
    value = keys.get(f"{KEY}.{path}")
    if isinstance(value, str) and re.fullmatch(r"\d{1,6}x\d{1,6}", value):
        value = [int(part) for part in value.split("x")]
    is_pair = isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2
    if not is_pair or any(type(each) is not int or each < 1 for each in value):
        raise _refusal(keys, path, "two whole numbers from 1, rows and columns")
    return value[0], value[1]


def _texts(where: str, key: str, value: object) -> list[str]:
    """A list of texts. Raises CheckpointError for anything else."""
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return value
    key = f"{KEY}.{key}"
    raise ConfigReader({key: value}, where).fail(key, "a list of module names: mend the config")


def _compiled(pattern: str, text: str, where: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, RecursionError, OverflowError) as error:
        raise CheckpointError(
            f"config.json of {where!r}: {KEY} names modules by {shown(text)}, which is no regular "
            f"expression ({error}): mend the config"
        ) from None
