"""Reading checkpoints: every layout that is published, and one clear message for what cannot be
used.
"""

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gemma4_oracle import PagedRun, load, make_target, text_config, to_public_layout
from safetensors.torch import load_file
from tiny_targets import edit_config, rewrite

from hydraspec.errors import CheckpointError, ConfigurationError
from hydraspec.models.checkpoint import reader, tensors
from hydraspec.models.checkpoint.reader import MAX_LISTED

WEIGHTS = "model.safetensors"
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
SHARED = text_config(
    num_hidden_layers=6,
    layer_types=["sliding_attention", "full_attention"] * 3,
    num_kv_shared_layers=2,
    hidden_size_per_layer_input=4,
    vocab_size_per_layer_input=96,
)


def logits_of(folder: Path) -> torch.Tensor:
    return PagedRun(load(folder), 1).step({0: PROMPT})[0][1]


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    make_target(SHARED, 1).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model.", "model."])
def test_prefixes_and_towers(prefix: str, saved: Path) -> None:
    expected = logits_of(saved)

    def change(tensors: dict) -> dict:
        named = {prefix + k.removeprefix("model."): v for k, v in tensors.items()}
        towers = ("vision_tower.a.weight", "embed_vision.embedding.weight", "embed_audio.c.weight")
        return named | {f"model.{name}": torch.zeros(2, 2) for name in towers}

    rewrite(saved, change)
    assert torch.equal(logits_of(saved), expected)


def test_both_config_layouts_and_shards(saved: Path, tmp_path: Path) -> None:
    expected = logits_of(saved)
    make_target(SHARED, 1).save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 3
    assert torch.equal(logits_of(tmp_path / "shards"), expected)
    to_public_layout(tmp_path / "shards", SHARED)
    assert torch.equal(logits_of(tmp_path / "shards"), expected)


def test_kv_tensors_of_sharing_layers_and_a_tied_heads_second_name_are_ignored(saved: Path) -> None:
    expected = logits_of(saved)
    extra = {
        "model.layers.4.self_attn.k_proj.weight": torch.ones(3, 3),
        "model.layers.5.self_attn.v_proj.weight": torch.ones(3, 3),
        "model.layers.5.self_attn.k_norm.weight": torch.ones(3),
        "lm_head.weight": torch.zeros(96, 32),
    }
    rewrite(saved, lambda tensors: tensors | extra)
    assert torch.equal(logits_of(saved), expected)


def test_surplus_tensors_are_listed(saved: Path) -> None:
    rewrite(saved, lambda t: t | {"model.layers.0.mlp.gate_proj.bias": torch.zeros(1)})
    with pytest.raises(CheckpointError, match=r"surplus tensors: layers\.0\.mlp\.gate_proj\.bias"):
        load(saved)


def test_missing_and_misshapen_tensors_are_listed(saved: Path) -> None:
    def change(tensors: dict) -> dict:
        del tensors["model.layers.2.layer_scalar"], tensors["model.norm.weight"]
        tensors["model.layers.1.self_attn.q_proj.weight"] = torch.zeros(64, 32)
        return tensors

    rewrite(saved, change)
    with pytest.raises(CheckpointError) as caught:
        load(saved)
    assert caught.value.exit_code == 3
    for part in (
        *("missing tensors: layers.2.layer_scalar, norm.weight", str(saved)),
        "misshapen tensors: layers.1.self_attn.q_proj.weight is [64, 32]",
        "config.json says [128, 32]",
    ):
        assert part in str(caught.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_weights_that_are_not_finite_are_refused(saved: Path, value: float) -> None:
    name = "model.layers.1.self_attn.q_proj.weight"

    def change(tensors: dict) -> dict:
        tensors[name][3, 5] = value
        return tensors

    rewrite(saved, change)
    with pytest.raises(CheckpointError, match="holds NaN or infinity: layers") as caught:
        load(saved)
    assert "infinity: layers.1.self_attn.q_proj.weight; expected" in str(caught.value)
    assert "target.dtype" not in str(caught.value)


def test_weights_that_the_dtype_cannot_hold_are_refused(saved: Path) -> None:
    """Catches a look at the file alone: float32 weights of 1e5 are infinite in float16."""

    def change(tensors: dict) -> dict:
        tensors["model.norm.weight"] *= 1e5
        return tensors

    rewrite(saved, change)
    load(saved)
    with pytest.raises(CheckpointError, match=r"norm\.weight; .*target\.dtype=bfloat16"):
        load(saved, torch.float16)


def test_long_lists_are_cut(saved: Path) -> None:
    rewrite(saved, lambda t: {k: v for k, v in t.items() if "layernorm" not in k})
    with pytest.raises(CheckpointError, match=r"and \d+ more") as caught:
        load(saved)
    assert str(caught.value).count("layernorm.weight") == MAX_LISTED


def quantise(folder: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    rewrite(folder, lambda t: t | {name: t[name].to(torch.float8_e4m3fn)})


SHARDS = {"a": "model-00001-of-00002.safetensors", "b": "model.safetensors"}
DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no folder": (shutil.rmtree, "does not exist; expected a folder with config.json"),
    "no config": (lambda f: (f / "config.json").unlink(), "has no config.json"),
    "half a config": (
        lambda f: (f / "config.json").write_text("{"),
        "config.json' is not readable json",
    ),
    "text for weights": (
        lambda f: (f / WEIGHTS).write_bytes(b"no safetensors at all"),
        "model.safetensors' is cut short or not a safetensors file",
    ),
    "pickles only": (
        lambda f: (f / WEIGHTS).rename(f / "pytorch_model.bin"),
        "only pickle files (pytorch_model.bin)",
    ),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), "has no safetensors file"),
    "a shard missing": (
        lambda f: (f / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": SHARDS})),
        "lacks model-00001-of-00002.safetensors, which its index lists",
    ),
    "quantised tensor": (quantise, "is quantised: layers.0.mlp.up_proj.weight (F8_E4M3)"),
    "another model": (lambda f: edit_config(f, model_type="gpt2"), "type 'gpt2'; targets are "),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_an_unusable_checkpoint_is_refused(name: str, saved: Path) -> None:
    damage, message = DAMAGE[name]
    damage(saved)
    with pytest.raises(CheckpointError, match=re.escape(message)) as caught:
        load(saved)
    assert str(saved) in str(caught.value)


BAD_VALUES = {
    "hidden_activation": "silu",
    "use_bidirectional_attention": "all",
    "hidden_size": None,
    "layer_types": ["sliding_attention"],
    "rope_parameters": {"sliding_attention": {"rope_type": "yarn"}},
    "num_kv_shared_layers": 5,
    "num_attention_heads": 3,
    "head_dim": 15,
    "per_layer_config": {"one": 1},
}


@pytest.mark.parametrize("key", BAD_VALUES)
def test_a_config_we_cannot_compute_is_refused(key: str, saved: Path) -> None:
    edit_config(saved, **{key: BAD_VALUES[key]})
    with pytest.raises(CheckpointError, match=f"{key} is .*; expected"):
        load(saved)


def test_a_file_and_an_unknown_zoo_name(saved: Path) -> None:
    with pytest.raises(CheckpointError, match="is a file; expected a folder"):
        load(saved / WEIGHTS)
    with pytest.raises(CheckpointError, match="'zoo:nothing' is not in the zoo"):
        load("zoo:nothing")


def test_a_hub_id_without_a_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(CheckpointError, match="hf download nobody/nothing-of-the-kind"):
        load("nobody/nothing-of-the-kind")


def test_random_weights_read_no_tensor_file(saved: Path) -> None:
    (saved / WEIGHTS).unlink()
    one, same, other = (load(saved, weights="random", seed=s) for s in (1, 1, 2))
    assert torch.equal(one.table.weight, same.table.weight)
    assert not torch.equal(one.table.weight, other.table.weight)
    logits = PagedRun(one, 1).step({0: PROMPT})[0][1]
    assert logits.isfinite().all()


def test_max_model_len_beyond_the_checkpoint(saved: Path) -> None:
    assert load(saved, max_model_len=256)
    with pytest.raises(
        ConfigurationError, match=r"(?s)target.max_model_len=257 .*allowed: 2 to 256"
    ):
        load(saved, max_model_len=257)


def test_unknown_weights(saved: Path) -> None:
    with pytest.raises(ConfigurationError, match="weights is 'zeros'"):
        load(saved, weights="zeros")


def test_generation_config_comes_first(saved: Path) -> None:
    assert load(saved).eos_token_ids == (1,)
    generation = {"eos_token_id": [1, 50, 4000], "suppress_tokens": [7]}
    (saved / "generation_config.json").write_text(json.dumps(generation))
    target = load(saved)
    assert target.eos_token_ids == (1, 50)
    assert target.suppress_token_ids == (7,)
    logits = PagedRun(target, 1).step({0: PROMPT})[0][1]
    assert torch.equal(logits.isinf().nonzero()[:, 1].unique(), torch.tensor([7]))


def test_weights_stream_one_tensor_at_a_time(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every file is closed before the next tensor is read, and no tensor outlives its copy."""
    alive, peak, opened = 0, 0, 0
    real = reader.safe_open

    class Watched:
        def __init__(self, *args: object, **kwargs: object) -> None:
            self.file = real(*args, **kwargs)

        def __enter__(self) -> "Watched":
            nonlocal opened
            opened += 1
            assert opened == 1, "two files are open"
            self.inner = self.file.__enter__()
            self.keys, self.get_slice = self.inner.keys, self.inner.get_slice
            return self

        def __exit__(self, *args: object) -> None:
            nonlocal opened
            opened -= 1
            self.file.__exit__(*args)

        def get_tensor(self, name: str) -> torch.Tensor:
            nonlocal alive, peak
            import weakref

            tensor = self.inner.get_tensor(name)
            size = tensor.nbytes
            alive += size
            peak = max(peak, alive)

            def gone() -> None:
                nonlocal alive
                alive -= size

            weakref.finalize(tensor, gone)
            return tensor

    monkeypatch.setattr(tensors, "safe_open", Watched)
    target = load(saved)
    sizes = [v.nbytes for v in load_file(saved / WEIGHTS).values()]
    assert alive == 0
    assert peak == max(sizes)
    assert target.memory_bytes() == sum(sizes)  # the tied head counts once


def test_an_untied_head_is_read(tmp_path: Path) -> None:
    make_target(text_config(tie_word_embeddings=False), 1).save_pretrained(tmp_path)
    target = load(tmp_path)
    assert target.head is not target.table
