"""Number formats as configs state them: each spelling read, modules matched, the rest refused."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hydraspec.errors import CheckpointError
from hydraspec.models.checkpoint.mistral_names import config_of_params
from hydraspec.models.checkpoint.quantization import Scheme
from hydraspec.models.checkpoint.quantization_config import Schemes, read_schemes

FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
INT4 = {"num_bits": 4, "type": "int", "symmetric": True}
CHANNEL = FP8 | {"strategy": "channel"}
TOKEN = FP8 | {"strategy": "token", "dynamic": True}
Q_PROJ = "model.layers.0.self_attn.q_proj"
OF_TOKENS = Scheme(kind="fp8", rows=1, columns=None, inputs="token")
OF_INT4 = Scheme(kind="int4", rows=1, columns=32, inputs="float")


def group(weights: Any, inputs: Any = None, targets: Any = None, **keys: Any) -> dict[str, Any]:
    targets = ["Linear"] if targets is None else targets
    return {"targets": targets, "weights": weights, "input_activations": inputs} | keys


def compressed(*groups: Any, **keys: Any) -> dict[str, Any]:
    """A quantization_config of compressed-tensors."""
    named = {f"group_{i}": each for i, each in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "config_groups": named} | keys


def read(values: Any, key: str = "quantization_config") -> Schemes:
    found = read_schemes({key: values}, "folder")
    assert found is not None
    return found


def fp8(**keys: Any) -> dict[str, Any]:
    """A quantization_config of transformers."""
    return {"quant_method": "fp8", "activation_scheme": "dynamic"} | keys


INPUT_TENSOR = FP8 | {"strategy": "tensor"}
BLOCK = FP8 | {"strategy": "block", "block_structure": [64, 128]}
READ: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "channels and tokens": (
        compressed(group(CHANNEL, TOKEN), format="float-quantized"),
        {"kind": "fp8", "rows": 1, "columns": None, "inputs": "token"},
    ),
    "blocks and groups": (
        compressed(
            group(BLOCK, FP8 | {"strategy": "group", "group_size": 128, "dynamic": True}),
            format="naive-quantized",
        ),
        {"kind": "fp8", "rows": 64, "columns": 128, "inputs": "group", "group": 128},
    ),
    "blocks as a text": (
        compressed(group(BLOCK | {"block_structure": "32x16"})),
        {"kind": "fp8", "rows": 32, "columns": 16, "inputs": "float"},
    ),
    "static inputs": (
        compressed(group(INPUT_TENSOR, INPUT_TENSOR | {"dynamic": False})),
        {
            **{"kind": "fp8", "rows": None, "columns": None},
            **{"inputs": "static", "input_scale": "input_scale"},
        },
    ),
    "dynamic inputs per tensor are taken per token": (
        compressed(group(INPUT_TENSOR, INPUT_TENSOR | {"dynamic": True})),
        {"kind": "fp8", "rows": None, "columns": None, "inputs": "token"},
    ),
    "strategies that the library infers": (
        compressed(group(FP8, FP8 | {"group_size": 16, "dynamic": True})),
        {"kind": "fp8", "rows": None, "columns": None, "inputs": "group", "group": 16},
    ),
    "packed groups": (
        compressed(
            group(
                INT4
                | {"strategy": "group", "group_size": 32, "actorder": "static"}
                | {"scale_dtype": "torch.bfloat16", "observer": "mse", "zp_dtype": None}
            ),
            format="pack-quantized",
            quantization_status="compressed",
            sparsity_config={},
            transform_config={},
            version="0.20.0",
        ),
        {"kind": "int4", "rows": 1, "columns": 32, "inputs": "float"},
    ),
    "packed channels": (
        compressed(group(INT4 | {"group_size": -1, "actorder": None})),
        {"kind": "int4", "rows": 1, "columns": None, "inputs": "float"},
    ),
    "transformers' blocks": (
        fp8(weight_block_size=[64, 32], fmt="e4m3"),
        {
            **{"kind": "fp8", "rows": 64, "columns": 32, "inputs": "group", "group": 32},
            "scale": "weight_scale_inv",
        },
    ),
    "transformers' default": (
        fp8(),
        {
            **{"kind": "fp8", "rows": 128, "columns": 128, "inputs": "group", "group": 128},
            "scale": "weight_scale_inv",
        },
    ),
    "transformers' static scale": (
        fp8(activation_scheme="static", weight_block_size=None),
        {
            **{"kind": "fp8", "rows": None, "columns": None, "inputs": "static"},
            **{"scale": "weight_scale_inv", "input_scale": "activation_scale"},
        },
    ),
    "transformers' dynamic scale per tensor": (
        fp8(weight_block_size=None, scale_fmt="float"),
        {
            **{"kind": "fp8", "rows": None, "columns": None, "inputs": "token"},
            "scale": "weight_scale_inv",
        },
    ),
}


@pytest.mark.parametrize("name", READ)
def test_each_spelling_is_read(name: str) -> None:
    values, expected = READ[name]
    assert read(values).of(Q_PROJ) == Scheme(**expected)


@pytest.mark.parametrize(
    ("said", "inputs", "scale"),
    [
        ("TENSOR", "static", "input_scale"),
        (None, "static", "input_scale"),
        ("NO_SCALES", "token", None),
    ],
)
def test_mistrals_own_spelling(said: str | None, inputs: Any, scale: str | None) -> None:
    params = {"quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": said}}
    found = read_schemes(config_of_params(params, "folder"), "folder")
    assert found is not None
    assert found.of("model.fc") == Scheme(
        kind="fp8", rows=None, columns=None, inputs=inputs, input_scale=scale
    )


def test_where_the_object_may_stand() -> None:
    """Wrappers of multimodal models nest it, and old releases name it otherwise."""
    values = compressed(group(CHANNEL, TOKEN))
    old = {"quantization_config": values, "sparsity_config": {}}
    for config in (
        {"quantization_config": values},
        {"text_config": {"quantization_config": values}},
        {"compression_config": values},
        {"compression_config": old},
        {"quantization_config": {k: v for k, v in values.items() if k != "quant_method"}},
    ):
        found = read_schemes(config, "folder")
        assert found is not None
        assert found.of(Q_PROJ) == OF_TOKENS, config
    for nothing in ({}, {"quantization_config": None}, {"text_config": {}}):
        assert read_schemes(nothing, "folder") is None


def test_a_name_goes_before_a_pattern_and_a_pattern_before_a_class() -> None:
    """As compressed-tensors orders its targets, whatever the order of the groups."""
    packed = INT4 | {"strategy": "group", "group_size": 32}
    wide = INT4 | {"strategy": "group", "group_size": 64}
    found = read(
        compressed(
            group(CHANNEL, TOKEN),
            group(packed, targets=[r"re:.*\.mlp\..*"], format="pack-quantized"),
            group(wide, targets=["model.layers.1.mlp.up_proj"]),
            format="mixed-precision",
            ignore=["lm_head", r"re:.*layers\.2\."],
        )
    )
    assert found.of(Q_PROJ) == OF_TOKENS
    assert found.of("model.layers.0.mlp.up_proj") == OF_INT4
    assert found.of("model.layers.1.mlp.up_proj") == Scheme(
        kind="int4", rows=1, columns=64, inputs="float"
    )
    for ignored in ("lm_head", "model.layers.2.mlp.up_proj"):
        assert found.of(ignored) is None
    assert found.of("model.lm_head") == OF_TOKENS, "names are whole"
    assert found.ignored.of("model.layers.2.mlp.up_proj") == r"re:.*layers\.2\."


def test_modules_that_no_group_names() -> None:
    found = read(compressed(group(CHANNEL, TOKEN, targets=[r"re:.*self_attn"])))
    assert found.of(Q_PROJ) == OF_TOKENS
    assert found.of("model.layers.0.mlp.up_proj") is None
    assert found.of("lm_head") is None


def test_modules_not_to_convert_are_whole_parts_of_names() -> None:
    """Catches transformers' own rule, by which a router's `mlp.gate` also skips the FP8
    `mlp.gate_proj`, and layer 1 layers 10 to 19."""
    names = ["model.vision_tower", "lm_head", "model.layers.1", "model.layers.3.mlp.gate"]
    found = read(fp8(modules_to_not_convert=[*names, r"model\.layers\.[45]\.mlp.*", "in_proj_a"]))
    for skipped in (
        "lm_head",
        "model.language_model.lm_head",
        "model.vision_tower.layers.0.q_proj",
        "model.layers.1.mlp.up_proj",
        "model.layers.3.mlp.gate",
        "model.layers.5.mlp.down_proj",
        "model.layers.7.linear_attn.in_proj_a",
    ):
        assert found.of(skipped) is None, skipped
    for quantised in (
        "model.layers.10.mlp.up_proj",
        "model.layers.3.mlp.gate_proj",
        "model.layers.4.self_attn.q_proj",
        "model.layers.7.linear_attn.in_proj_ab",
    ):
        assert found.of(quantised) is not None, quantised


def test_the_output_layer_is_float_unless_a_list_says_otherwise() -> None:
    assert read(fp8()).of("lm_head") is None
    assert read(fp8(ignored_layers=["model.layers.0"])).of(Q_PROJ) is None
    assert read(fp8(modules_to_not_convert=[])).of("lm_head") is not None


def test_a_scheme_of_the_cache_is_noted() -> None:
    found = read(compressed(group(CHANNEL, TOKEN), kv_cache_scheme=INPUT_TENSOR))
    assert "kv_cache_scheme" in found.kv_note
    assert "folder" in found.kv_note
    assert read(compressed(group(CHANNEL, TOKEN), kv_cache_scheme=None)).kv_note == ""


def changed(**keys: Any) -> dict[str, Any]:
    return compressed(group(CHANNEL | keys, TOKEN))


REFUSED: dict[str, tuple[Any, str]] = {
    "no object": ("fp8", "quantization_config is 'fp8'; expected an object"),
    "awq": ({"quant_method": "awq"}, "quant_method is 'awq'; expected compressed-tensors or fp8"),
    "gptq": ({"quant_method": "gptq"}, "quant_method is 'gptq'"),
    "modelopt": ({"quant_algo": "NVFP4"}, "quant_method is nothing"),
    "mxfp4": ({"quant_method": "mxfp4"}, "quant_method is 'mxfp4'"),
    "bitsandbytes": ({"quant_method": "bitsandbytes"}, "quant_method is 'bitsandbytes'"),
    "nvfp4": (
        compressed(group(FP8 | {"num_bits": 4}), format="nvfp4-pack-quantized"),
        "quantization_config.format is 'nvfp4-pack-quantized'",
    ),
    "a group's own format": (
        compressed(group(CHANNEL, format="mxfp8-quantized"), format="mixed-precision"),
        "config_groups.group_0.format is 'mxfp8-quantized'",
    ),
    "a format of other numbers": (
        compressed(group(CHANNEL), format="pack-quantized"),
        "weights.type is 'float'; expected the type that format pack-quantized stores",
    ),
    "int8": (changed(type="int"), "weights.num_bits is 8; expected 8 with type float"),
    "fp4": (changed(num_bits=4), "weights.num_bits is 4"),
    "no bits": (compressed(group({"type": "float"})), "weights.num_bits is nothing"),
    "asymmetric": (changed(symmetric=False), "weights.symmetric is False; expected true"),
    "dynamic weights": (changed(dynamic=True), "weights.dynamic is True; expected false"),
    "groups of fp8": (
        changed(strategy="group", group_size=32),
        "weights.strategy is 'group'; expected tensor, channel or block",
    ),
    "unknown argument": (changed(block_order="x"), "weights.block_order is 'x'; expected no such"),
    "scales in bytes": (changed(scale_dtype="torch.uint8"), "scale_dtype is 'torch.uint8'"),
    "actorder": (
        compressed(group(INT4 | {"group_size": 32, "actorder": "group"})),
        "weights.actorder is 'group'; expected null, weight or static",
    ),
    "actorder as a flag": (
        compressed(group(INT4 | {"group_size": 32, "actorder": True})),
        "weights.actorder is True",
    ),
    "a group of 0": (
        compressed(group(INT4 | {"strategy": "group", "group_size": 0})),
        "weights.group_size is 0; expected an integer from 1 to",
    ),
    "a group without a size": (
        compressed(group(INT4 | {"strategy": "group"})),
        "weights.group_size is nothing; expected an integer from 1 to",
    ),
    "a group's size as a text": (
        compressed(group(INT4 | {"strategy": "group", "group_size": "32"})),
        "weights.group_size is '32'; expected an integer from 1 to",
    ),
    "a block of 0": (
        compressed(group(BLOCK | {"block_structure": [0, 128]})),
        "block_structure is [0, 128]; expected two whole numbers from 1",
    ),
    "no block": (compressed(group(FP8 | {"strategy": "block"})), "block_structure is nothing"),
    "int4 with rounded inputs": (
        compressed(group(INT4 | {"group_size": 32}, TOKEN)),
        "input_activations is {'num_bits': 8",
    ),
    "int8 inputs": (
        compressed(group(CHANNEL, TOKEN | {"type": "int"})),
        "input_activations.num_bits is 8",
    ),
    "local inputs": (
        compressed(group(CHANNEL, TOKEN | {"dynamic": "local"})),
        "input_activations.dynamic is 'local'",
    ),
    "static inputs per token": (
        compressed(group(CHANNEL, TOKEN | {"dynamic": False})),
        "input_activations.strategy is 'token'; expected token, tensor or group if dynamic",
    ),
    "rounded outputs": (
        compressed(group(CHANNEL, output_activations=TOKEN)),
        "output_activations is {",
    ),
    "sparsity": (
        compressed(group(CHANNEL), sparsity_config={"format": "sparse-24-bitmask"}),
        "sparsity_config is {'format': 'sparse-24-bitmask'}; expected none",
    ),
    "rotations": (
        compressed(group(CHANNEL), transform_config={"config_groups": {"R1": {}}}),
        "transform_config is ",
    ),
    "no groups": (compressed(), "config_groups is {}; expected an object of groups"),
    "a group as a list": (compressed(["Linear"]), "config_groups.group_0 is ['Linear']"),
    "no weights": (compressed(group(None)), "group_0.weights is None; expected an object"),
    "targets as a text": (compressed(group(CHANNEL, targets="Linear")), "targets is 'Linear'"),
    "ignore as a text": (compressed(group(CHANNEL), ignore="lm_head"), "ignore is 'lm_head'"),
    "no regular expression": (
        compressed(group(CHANNEL), ignore=["re:.*(mlp"]),
        "names modules by 're:.*(mlp', which is no regular expression",
    ),
    "no pattern of modules": (fp8(modules_to_not_convert=["*.gate"]), "by '*.gate', which is no"),
    "e5m2": (fp8(fmt="e5m2"), "fmt is 'e5m2'; expected"),
    "scales that are powers of two": (fp8(scale_fmt="ue8m0"), "scale_fmt is 'ue8m0'; expected fl"),
    "fp4 experts": (fp8(expert_dtype="fp4"), "expert_dtype is 'fp4'; expected fp8, or null"),
    "embeddings": (fp8(modules_to_convert=["ngram"]), "modules_to_convert is ['ngram']"),
    "three sizes": (fp8(weight_block_size=[1, 2, 3]), "weight_block_size is [1, 2, 3]"),
    "an odd activation scheme": (fp8(activation_scheme="sometimes"), "activation_scheme is 'some"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_computed_is_refused(name: str) -> None:
    values, words = REFUSED[name]
    with pytest.raises(CheckpointError) as caught:
        read(values)
    message = str(caught.value)
    assert words in message
    assert "folder" in message
    assert any(remedy in message for remedy in ("mend", "give such a release"))


def test_a_refusal_names_the_modules_of_its_group() -> None:
    with pytest.raises(CheckpointError, match=r"group's modules: \['re:.*experts.*'\]"):
        read(compressed(group(FP8 | {"num_bits": 4}, targets=["re:.*experts.*"])))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 200) | st.sampled_from(["tensor", "re:(", "float"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from([*READ["packed groups"][0], *CHANNEL, *group({}), "group_size"]), inner
        )
    ),
    max_leaves=8,
)


@given(JSON, st.sampled_from(["compressed-tensors", "fp8", None]), JSON)
def test_no_config_is_answered_with_a_traceback(values: Any, method: str | None, part: Any) -> None:
    """Catches `TypeError: unhashable type` and the like, in any key of the object."""
    configs = [values, compressed(part), compressed(group(part)), compressed(group(CHANNEL, part))]
    configs.append({"quant_method": method} | (values if isinstance(values, dict) else {}))
    for config in configs:
        try:
            found = read_schemes({"quantization_config": config}, "folder")
        except CheckpointError:
            continue
        assert found is None or found.of(Q_PROJ) in (None, found.targets.of(Q_PROJ))
