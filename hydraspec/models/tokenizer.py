"""Conversion of text to token ids and back, through the checkpoint's own tokenizer files."""

from __future__ import annotations

import json
import os
import re
import tempfile
from codecs import BOM_UTF8
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from pathlib import Path
from typing import Any

from hydraspec.errors import CheckpointError, WorkloadError

ROLES = ("system", "developer", "user", "assistant", "tool")
REASONING = (("<think>", "</think>"), ("<|channel>", "<channel|>"))  # in released templates
LABEL = "thought"  # behind a marker in Gemma 4's templates
MOST_BEHIND = 16  # tokens that a template writes behind a marker
THINKING = ("enable_thinking", "thinking")  # the switch's names in released templates
MAX_CHARACTERS = 1 << 24  # of a prompt rendered by a chat template
MAX_FILE_BYTES = 1 << 28  # of each file of a tokenizer: the largest released have 40 MB

_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")
_BESIDE = (
    *("config.json", "special_tokens_map.json", "added_tokens.json", "chat_template.jinja"),
    *("vocab.json", "vocab.txt", "merges.txt", "chat_template.json"),
)
# Models whose folders transformers 5 reads as it has saved them; of others it may choose a class.
_READ_AS_SAVED = ("gemma4", "qwen3", "deepseek_v3")


class Tokenizer:
    """Wraps a transformers tokenizer."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def encode(self, prompt: str) -> list[int]:
        """Token ids of a plain prompt, with the special tokens that the tokenizer adds itself."""
        return list(self._inner.encode(prompt))

    def encode_within(self, text: str) -> list[int]:
        """Token ids of a part of a text, without special tokens."""
        return list(self._inner.encode(text, add_special_tokens=False))

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        after: str | None = None,
        thinking: bool | None = None,
    ) -> list[int]:
        """Token ids of a conversation, ready for the assistant's turn; with `after` only those
        after this text of an earlier message, which must occur once. `thinking` is given to the
        template under the name in THINKING that it knows.

        Raises WorkloadError if the checkpoint has no chat template, or the template refuses the
        messages, has no place for a role, for the text `after` or for `thinking`, or makes a text
        beyond MAX_CHARACTERS.
        """
        if not getattr(self._inner, "chat_template", None):
            raise WorkloadError(
                "messages need a chat template, and this checkpoint has none: give prompt instead"
            )
        self._check_roles(messages)
        switch = self._switch(thinking)
        try:
            text = self._inner.apply_chat_template(
                [dict(message) for message in messages],
                tokenize=False,
                add_generation_prompt=True,
                **switch,
            )
        except MemoryError:
            raise
        except Exception as error:  # templates may raise any exception
            raise WorkloadError(f"the chat template refuses these messages: {error}") from None
        if len(text) > MAX_CHARACTERS:
            raise WorkloadError(
                f"the chat template makes {len(text)} characters of these messages; at most "
                f"{MAX_CHARACTERS} are read"
            )
        _refuse_dropped(messages, text)
        if after is not None:
            if text.count(after) != 1:
                raise WorkloadError(
                    "turns: the chat template does not write an earlier answer as it was given, "
                    "once: give turns of token ids, or single requests"
                )
            text = text.partition(after)[2]
        return list(self._inner.encode(text, add_special_tokens=False))

    @property
    def chat_template(self) -> str | None:
        """The chat template; None if the tokenizer has none, or several."""
        template = getattr(self._inner, "chat_template", None)
        return template if isinstance(template, str) else None

    @property
    def inner(self) -> Any:
        """The transformers tokenizer, for libraries that read one."""
        return self._inner

    @property
    def special_token_ids(self) -> set[int]:
        """Ids that `decode` leaves out."""
        added = self._inner.added_tokens_decoder
        named = {token_id for token_id, token in added.items() if token.special}
        return named | set(self._inner.all_special_ids)

    @property
    def reasoning_markers(self) -> tuple[int, int] | None:
        """The tokens that begin and end a reasoning section, where the chat template has such
        sections and each is one token; else None."""
        template = json.dumps(getattr(self._inner, "chat_template", None) or "")
        for pair in REASONING:
            if any(marker in template for marker in pair) and all(map(self.knows, pair)):
                first, last = (self._inner.convert_tokens_to_ids(marker) for marker in pair)
                return first, last
        return None

    def reasoning_at_end(self, prompt: Sequence[int]) -> bool | None:
        """Returns whether the reasoning section at a prompt's end is open; None: it ends with none.
        A template ends it with a marker and white space, or LABEL; other markers are text of
        messages.
        """
        markers, end = self.reasoning_markers, list(prompt[-MOST_BEHIND:])
        places = [i for i, token in enumerate(end) if markers and token in markers]
        if not markers or not places:
            return None
        is_open = end[places[-1]] == markers[0]
        behind = str(self._inner.decode(end[places[-1] + 1 :])).strip()
        return is_open if not behind or (is_open and behind == LABEL) else None

    @property
    def bos_token_id(self) -> int | None:
        """Id of the token that begins a text; None if the tokenizer names none."""
        found: int | None = getattr(self._inner, "bos_token_id", None)
        return found

    def with_template(self, template: str) -> Tokenizer:
        """The same tokenizer with another chat template."""
        inner = copy(self._inner)
        inner.chat_template = template
        return Tokenizer(inner)

    def knows(self, marker: str) -> bool:
        """Returns whether a text such as "<|im_start|>" is one token."""
        return len(self._inner.encode(marker, add_special_tokens=False)) == 1

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids, without special tokens. Raises CheckpointError where the tokenizer's
        library panics.
        """
        with _panics_as_errors():
            return str(self._inner.decode(list(token_ids), skip_special_tokens=True))

    def _switch(self, thinking: bool | None) -> dict[str, bool]:
        """The template's variable that turns thinking on or off; {} if `thinking` is None."""
        if thinking is None:
            return {}
        template = json.dumps(self._inner.chat_template)
        known = [name for name in THINKING if re.search(rf"\b{name}\b", template)]
        if not known:
            raise WorkloadError(
                f"workload.thinking={str(thinking).lower()}: the chat template has no switch "
                f"({' or '.join(THINKING)}): leave the key out"
            )
        return {known[0]: thinking}

    def _check_roles(self, messages: Sequence[Mapping[str, Any]]) -> None:
        """Refuse unknown roles, which templates write into the prompt as they are, or drop."""
        template = json.dumps(self._inner.chat_template)  # a string, or several by name
        for message in messages:
            role = message["role"]
            if role not in ROLES and not re.search(rf"""['"]{re.escape(role)}\\?['"]""", template):
                raise WorkloadError(
                    f"messages: role {role!r} is none that the chat template knows; allowed are "
                    f"{', '.join(ROLES)}, and those that the template names"
                )


def _refuse_dropped(messages: Sequence[Mapping[str, Any]], text: str) -> None:
    """Refuse a message of an unusual role, or of parts, that left no trace in the prompt. Templates
    may rewrite what users and assistants said (a chain of thought is cut), but not leave out a
    whole role, or write a list of parts as one.
    """
    for message in messages:
        role, content = message["role"], message["content"]
        if isinstance(content, str):
            if role not in ("user", "assistant") and not _occurs(content, text):
                raise WorkloadError(
                    f"messages: the chat template leaves the message of role {role!r} out; choose "
                    "a role that it has a place for"
                )
            continue
        is_list = any(written(content) in text for written in (repr, json.dumps))
        if is_list or not all(_occurs(part.get("text", ""), text) for part in content):
            raise WorkloadError(
                "messages: the chat template takes no list of parts as content; give the text as "
                "one string, or a target whose template has a place for pictures"
            )


def _occurs(content: str, text: str) -> bool:
    content = content.strip()
    return content in text or json.dumps(content, ensure_ascii=False)[1:-1] in text


@contextmanager
def _panics_as_errors() -> Iterator[None]:
    """Context that raises CheckpointError for a panic of the tokenizers library, which is a
    BaseException.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(f"the tokenizer's library failed: {error}") from None


def load_tokenizer(folder: Path | str) -> Tokenizer | None:
    """The folder's tokenizer, or None if it has no tokenizer files. Code in the folder is not
    run.

    Raises CheckpointError if the files are there and unreadable, or larger than MAX_FILE_BYTES.
    """
    folder = Path(folder)
    present = [folder / name for name in (*_FILES, *_BESIDE) if (folder / name).is_file()]
    if not any(file.name in _FILES for file in present):
        return None
    try:
        for file in present:
            _refuse_large(file)
        with _panics_as_errors(), _silent(), _without_bom(folder, present) as readable:
            inner = _reader(readable).from_pretrained(
                str(readable), local_files_only=True, trust_remote_code=False
            )
    except Exception as error:  # broken json, missing vocabulary, classes that need remote code
        why = " ".join(str(error).split())  # messages of the library have several lines
        raise CheckpointError(
            f"the tokenizer of {str(folder)!r} cannot be read: its files, or config.json beside "
            f"them ({type(error).__name__}: {why}): download them again, or remove the "
            "tokenizer's files and give prompt_token_ids"
        ) from None
    return Tokenizer(inner)


def _reader(folder: Path) -> Any:
    """The class of transformers that reads the folder's tokenizer: the one that AutoTokenizer would
    choose, whose import takes three seconds, or AutoTokenizer.
    """
    settings, config = (
        json.loads(file.read_bytes()) if (file := folder / name).is_file() else {}
        for name in ("tokenizer_config.json", "config.json")
    )
    if (
        settings.get("tokenizer_class") == "TokenizersBackend"
        and "auto_map" not in settings
        and str(config.get("model_type")).startswith(_READ_AS_SAVED)
    ):
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast
    from transformers import AutoTokenizer

    return AutoTokenizer


@contextmanager
def _silent() -> Iterator[None]:
    """Context that drops stderr: the library prints a panic before it can be caught."""
    try:
        kept = os.dup(2)
    except OSError:  # stderr is closed
        yield
        return
    try:
        with open(os.devnull, "wb") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def _refuse_large(file: Path) -> None:
    size = file.stat().st_size
    if size > MAX_FILE_BYTES:
        raise ValueError(f"{file.name} has {size} bytes; at most {MAX_FILE_BYTES} are read")


@contextmanager
def _without_bom(folder: Path, present: Sequence[Path]) -> Iterator[Path]:
    """Context of the folder; or, if a json file begins with a byte order mark, which transformers
    cannot read, of a temporary copy of the files without the mark.
    """
    with_bom = [f for f in present if f.suffix == ".json" and _starts_with_bom(f)]
    if not with_bom:
        yield folder
        return
    with tempfile.TemporaryDirectory() as temporary:
        for file in present:
            content = file.read_bytes()
            (Path(temporary) / file.name).write_bytes(
                content.removeprefix(BOM_UTF8) if file in with_bom else content
            )
        yield Path(temporary)


def _starts_with_bom(file: Path) -> bool:
    with file.open("rb") as opened:
        return opened.read(len(BOM_UTF8)) == BOM_UTF8
