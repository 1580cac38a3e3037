"""Files of a checkpoint that are odd, damaged or hostile: one message each, never a traceback."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from gemma4_oracle import load
from tiny_targets import edit_config

from hydraspec.errors import CheckpointError
from hydraspec.models.checkpoint.config_reader import MAX_COUNT
from hydraspec.models.checkpoint.reader import ZOO, open_checkpoint, read_json

INDEX = "model.safetensors.index.json"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A zoo target whose files may be changed."""
    copied = tmp_path / "checkpoint"
    shutil.copytree(ZOO / "tiny_qwen3", copied)
    return copied


@pytest.mark.parametrize(
    "name",
    [
        *(3, None, ["a"], {"a": 1}, 1.5, "", ".", ".."),
        *("../model.safetensors", "/etc/passwd", "a/../../b.safetensors", "..\\b.safetensors"),
    ],
    ids=repr,
)
def test_a_weight_map_names_files_of_its_folder_only(folder: Path, name: object) -> None:
    """Catches `TypeError: unhashable`, and files read from anywhere on the machine."""
    shutil.copy(folder / "model.safetensors", folder.parent)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    with pytest.raises(CheckpointError, match=r"weight_map of 'lm_head\.weight' is .* its folder"):
        open_checkpoint(str(folder)).entries()


@pytest.mark.parametrize("name", ["n" * 300, "n\0", "\ud800"], ids=["long", "null", "surrogate"])
def test_a_weight_map_with_names_that_cannot_be(folder: Path, name: str) -> None:
    """Catches `OSError: File name too long`."""
    (folder / INDEX).write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    with pytest.raises(CheckpointError, match=r"lacks .*, which its index lists") as caught:
        open_checkpoint(str(folder)).entries()
    str(caught.value).encode()


def test_links_are_followed_as_in_the_hubs_cache(folder: Path) -> None:
    """snapshots/<commit>/model.safetensors is a link to ../../blobs/<hash>."""
    blobs = folder.parent / "blobs"
    blobs.mkdir()
    (folder / "model.safetensors").rename(blobs / "0f")
    (folder / "model-1.safetensors").symlink_to("../blobs/0f")
    found = {"weight_map": {"model.norm.weight": "model-1.safetensors"}}
    (folder / INDEX).write_text(json.dumps(found))
    assert "model.norm.weight" in open_checkpoint(str(folder)).entries()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda file: (file.unlink(), file.mkdir()), "cannot be read: Is a directory"),
        (lambda file: (file.unlink(), file.symlink_to("/proc/self/mem")), "cannot be read: Input"),
        (lambda file: file.write_bytes(file.read_bytes()[:1000]), "is cut short"),
        (lambda file: file.write_bytes(b""), "is cut short"),
    ],
    ids=["a folder", "a disk error", "half a file", "empty"],
)
def test_a_file_that_cannot_be_read_is_not_called_cut_short(
    folder: Path, damage: Callable[[Path], object], said: str
) -> None:
    if "Input" in said and not Path("/proc/self/mem").exists():
        pytest.skip("no /proc here")
    damage(folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(str(folder)).entries()


def test_json_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(file: Path) -> bytes:
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr(Path, "read_bytes", refuse)
    with pytest.raises(CheckpointError, match=r"config\.json' cannot be read: Permission denied"):
        read_json(tmp_path / "config.json")


def test_json_nested_very_deeply(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"a": ' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(CheckpointError, match="nested too deeply"):
        read_json(file)


def test_json_with_a_byte_order_mark(tmp_path: Path) -> None:
    file = tmp_path / "config.json"
    file.write_text('{"a": 1}', encoding="utf-8-sig")
    assert read_json(file) == {"a": 1}


@pytest.mark.parametrize(
    "ids", ["1", 1.5, -1, True, [[1]], [1, None], {"id": 1}], ids=lambda ids: json.dumps(ids)
)
@pytest.mark.parametrize("name", ["generation_config.json", "config.json"])
def test_end_tokens_that_are_no_ids(folder: Path, ids: object, name: str) -> None:
    """Catches `ValueError: invalid literal for int`, and 1.5 taken for token 1."""
    edit_config(folder, "generation_config.json", eos_token_id=None)
    edit_config(folder, name, eos_token_id=ids)
    with pytest.raises(CheckpointError, match=f"{name} of .*: eos_token_id is .* expected a token"):
        load(folder)


def test_end_tokens_beyond_the_vocabulary_end_nothing(folder: Path) -> None:
    edit_config(folder, "generation_config.json", eos_token_id=[5, 10**30])
    assert load(folder).eos_token_ids == (5,)


@pytest.mark.parametrize("key", ["vocab_size", "max_position_embeddings", "num_hidden_layers"])
def test_sizes_that_no_model_has(folder: Path, key: str) -> None:
    """Catches an allocation of petabytes."""
    edit_config(folder, **{key: 10**15})
    with pytest.raises(CheckpointError, match=f"{key} is {10**15}; .* at most {MAX_COUNT}"):
        load(folder)


def test_values_are_cut_in_messages(folder: Path) -> None:
    edit_config(folder, vocab_size="x" * 10_000)
    with pytest.raises(CheckpointError, match=r"vocab_size is 'x+\.\.\.; expected") as caught:
        load(folder)
    assert len(str(caught.value)) < 500
