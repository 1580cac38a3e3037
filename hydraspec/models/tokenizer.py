"""Text to token ids and back, through the checkpoint's own tokenizer files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hydraspec.errors import CheckpointError, WorkloadError

_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")


class Tokenizer:
    """Wraps a transformers tokenizer."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def encode(self, prompt: str) -> list[int]:
        """Token ids of a plain prompt, with the special tokens that the tokenizer adds itself."""
        return list(self._inner.encode(prompt))

    def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation, ready for the assistant's turn.

        Raises WorkloadError if the checkpoint has no chat template, or it refuses the messages.
        """
        if not getattr(self._inner, "chat_template", None):
            raise WorkloadError(
                "messages need a chat template, and this checkpoint has none: give prompt instead"
            )
        try:
            text = self._inner.apply_chat_template(
                [dict(message) for message in messages], tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # templates raise whatever they like
            raise WorkloadError(f"the chat template refuses these messages: {error}") from None
        return list(self._inner.encode(text, add_special_tokens=False))

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens."""
        return str(self._inner.decode(list(token_ids), skip_special_tokens=True))


def load_tokenizer(folder: Path | str) -> Tokenizer | None:
    """The folder's tokenizer, or None where it has no tokenizer files. Never runs code from the
    folder.

    Raises CheckpointError if the files are there and unreadable.
    """
    if not any((Path(folder) / name).is_file() for name in _FILES):
        return None
    from transformers import AutoTokenizer

    try:
        inner = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # broken json, missing vocabulary, classes that need remote code
        raise CheckpointError(
            f"the tokenizer of {str(folder)!r} cannot be read: its files, or config.json beside "
            f"them ({type(error).__name__}: {error}): download them again, or remove the "
            "tokenizer's files and give prompt_token_ids"
        ) from None
    return Tokenizer(inner)
