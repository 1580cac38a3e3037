"""Tokenizers come from the checkpoint's own files, or not at all."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hydraspec.errors import CheckpointError, WorkloadError
from hydraspec.models.checkpoint.reader import resolve_folder
from hydraspec.models.tokenizer import _reader, load_tokenizer

TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}model{% endif %}"
)


def save(folder: Path, template: str | None) -> Path:
    words = {word: i for i, word in enumerate(["<unk>", "<eos>", "user", "model", "two", "plus"])}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    fast = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>", eos_token="<eos>")
    fast.chat_template = template
    fast.save_pretrained(folder)
    return folder


def test_text_and_chat(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save(tmp_path, TEMPLATE))
    assert tokenizer is not None
    assert tokenizer.encode("two plus two") == [4, 5, 4]
    assert tokenizer.encode_chat([{"role": "user", "content": "two plus"}]) == [2, 4, 5, 3]
    assert tokenizer.decode([4, 5, 1]) == "two plus"


def test_another_template_leaves_the_tokenizer_as_it_is(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save(tmp_path, TEMPLATE))
    assert tokenizer is not None
    other = tokenizer.with_template("{{ messages[0]['content'] }}")
    assert other.encode_chat([{"role": "user", "content": "two plus"}]) == [4, 5]
    assert tokenizer.chat_template == TEMPLATE
    assert tokenizer.bos_token_id is None
    assert tokenizer.knows("model")
    assert not tokenizer.knows("two plus")


@pytest.mark.parametrize(
    "name",
    ["tiny_gemma4", "tiny_gemma4_unified", "tiny_gemma4_images", "tiny_deepseek", "tiny_qwen3"],
)
def test_folders_saved_by_transformers_are_read_as_auto_tokenizer_reads_them(name: str) -> None:
    """They are read without AutoTokenizer, whose import takes longer than all others."""
    folder = resolve_folder(f"zoo:{name}")
    read, wanted = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    assert read is not None
    assert type(read._inner) is type(wanted)
    assert read._inner.special_tokens_map == wanted.special_tokens_map
    assert read.chat_template == wanted.chat_template
    text = "def f(x):\n\treturn x <eos> é 12"
    assert read.encode(text) == wanted.encode(text)


def test_other_folders_are_read_by_auto_tokenizer(tmp_path: Path) -> None:
    """It knows models whose files name the wrong class."""
    folder = save(tmp_path, None)
    for model_type, name, reader in (
        ("gemma4_text", "TokenizersBackend", PreTrainedTokenizerFast),
        ("qwen2", "TokenizersBackend", AutoTokenizer),
        ("gemma4_text", "GemmaTokenizer", AutoTokenizer),
    ):
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": name}))
        assert _reader(folder) is reader


def test_a_folder_without_tokenizer_files(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None


def test_messages_without_a_chat_template(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(save(tmp_path, None))
    assert tokenizer is not None
    with pytest.raises(WorkloadError, match="give prompt instead"):
        tokenizer.encode_chat([{"role": "user", "content": "two"}])


def test_broken_tokenizer_files(tmp_path: Path) -> None:
    (save(tmp_path, None) / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match="download them again"):
        load_tokenizer(tmp_path)


def test_a_config_that_the_tokenizer_trips_over_is_named(tmp_path: Path) -> None:
    """transformers reads config.json for the tokenizer's sake, more strictly than we do."""
    config = {"model_type": "llama", "rms_norm_eps": None, "eos_token_id": "x"}
    (save(tmp_path, None) / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"or config\.json beside them .*(rms|eos)"):
        load_tokenizer(tmp_path)
