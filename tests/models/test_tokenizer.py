"""Tokenizers come from the checkpoint's own files, or not at all."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hydraspec.errors import CheckpointError, WorkloadError
from hydraspec.models.tokenizer import load_tokenizer

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
