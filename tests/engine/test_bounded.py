"""Chat templates and tokenizers that never end, fill the memory, panic or have no place for a
role.
"""

from __future__ import annotations

import gc
import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_engine import make_info
from records import request

from hydraspec.engine import bounded as bounding
from hydraspec.engine.bounded import OutOfBoundsError, bounded
from hydraspec.engine.prompts import tokenize
from hydraspec.errors import CheckpointError, WorkloadError
from hydraspec.models.checkpoint.reader import ZOO
from hydraspec.models.tokenizer import Tokenizer, load_tokenizer

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="bounds need a safe fork")

LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
NAMES_NARRATOR = "{% if messages[0]['role'] == 'narrator' %}{{ messages[0]['content'] }}{% endif %}"


def test_the_process_collects_no_garbage() -> None:
    """The bug: a collection in the forked process freed tensors of the device, which a fork cannot
    use, and the process was aborted (signal 6)."""
    assert gc.isenabled()
    assert list(bounded(lambda _: gc.isenabled(), ["x"])) == [False]
    assert gc.isenabled()


def test_nor_while_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What others have registered runs in the new process before any of its own code."""
    collects, fork = [], os.fork

    def forked() -> int:
        collects.append(gc.isenabled())
        return fork()

    monkeypatch.setattr(os, "fork", forked)
    assert list(bounded(lambda item: item, ["x"])) == ["x"]
    assert collects == [False]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The tokenizer of a zoo target; its files may be changed."""
    copied = tmp_path / "checkpoint"
    shutil.copytree(ZOO / "tiny_qwen3", copied, ignore=shutil.ignore_patterns("*.safetensors"))
    return copied


def encode(folder: Path, *roles: str, prompt: str | None = None) -> list[int]:
    messages = [{"role": role, "content": f"said by {role}"} for role in roles]
    asked = request(id="r", prompt=prompt, messages=messages or None)
    tokenize([asked], load_tokenizer(folder), make_info(vocab_size=768), "zoo:tiny_qwen3")
    assert asked.prompt_token_ids is not None
    return asked.prompt_token_ids


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (LOOPS, "more than 1 seconds"),
        ("{{ 'a' * 10000000000 }}", "more than 4 GiB of memory"),
        ("{{ 'a' * 20000000 }}", "makes 20000000 characters"),
        ("{{ raise_exception('not so') }}", "refuses these messages: not so"),
        ("{{ messages[0]['content'] }", "refuses these messages: "),
    ],
    ids=["never ends", "memory", "length", "refuses", "no template"],
)
def test_a_chat_template_that_cannot_be_used(
    folder: Path, template: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounding, "SECONDS_PER_ITEM", 1 if template == LOOPS else 30)
    (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(WorkloadError, match=f"request r: .*{said}") as caught:
        encode(folder, "user")
    assert caught.value.request_id == "r"
    if "more than" in said:
        assert "or give prompt_token_ids" in str(caught.value)
    with pytest.raises(ChildProcessError):  # the exception is still held: nothing may wait on that
        os.waitpid(-1, os.WNOHANG)


@pytest.mark.parametrize(
    ("template", "roles", "said"),
    [
        (None, ["user", "narrator"], "role 'narrator' is none that the chat template knows"),
        ("{{ messages[1]['content'] }}", ["system", "user"], "message of role 'system' out"),
        ("{{ messages[0]['content'] }}", ["user", "tool"], "message of role 'tool' out"),
    ],
    ids=["unknown", "dropped", "dropped at the end"],
)
def test_a_role_outside_the_template_is_refused(
    folder: Path, template: str | None, roles: list[str], said: str
) -> None:
    """Templates write an unknown role into the prompt, or leave its message out, in silence."""
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    with pytest.raises(WorkloadError, match=said):
        encode(folder, *roles)


def test_roles_that_the_template_has_a_place_for(folder: Path) -> None:
    assert encode(folder, "system", "user", "assistant", "user")
    (folder / "chat_template.jinja").write_text(NAMES_NARRATOR)
    assert encode(folder, "narrator")


def test_a_tokenizer_that_panics_is_one_message(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A PanicException is no Exception: it went through every guard."""
    damage(folder, lambda inner: inner["post_processor"]["single"].append(missing()))
    with pytest.raises(WorkloadError, match=r"request r: .*no entry found for key"):
        encode(folder, prompt="a")
    assert capfd.readouterr().err == ""


def test_a_tokenizer_that_panics_while_it_loads(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    broken = {"type": "Precompiled", "precompiled_charsmap": "AAAA"}
    damage(folder, lambda inner: inner.update(normalizer=broken))
    with pytest.raises(CheckpointError, match="Cannot parse precompiled_charsmap"):
        load_tokenizer(folder)
    assert capfd.readouterr().err == ""


def test_a_panic_while_decoding_is_one_message() -> None:
    class PanicException(BaseException):
        pass

    class Inner:
        def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
            raise PanicException("index out of bounds")

    with pytest.raises(CheckpointError, match="library failed: index out of bounds"):
        Tokenizer(Inner()).decode([1])


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json", "tokenizer.json"])
def test_files_with_a_byte_order_mark(folder: Path, name: str) -> None:
    expected = encode(folder, "user")
    (folder / name).write_bytes(b"\xef\xbb\xbf" + (folder / name).read_bytes())
    assert encode(folder, "user") == expected


def test_a_tokenizer_file_beyond_all_measure(folder: Path) -> None:
    os.truncate(folder / "tokenizer.json", 1 << 34)  # sparse: it takes no room
    with pytest.raises(CheckpointError, match=r"tokenizer\.json has 17179869184 bytes; at most"):
        load_tokenizer(folder)


def test_results_come_in_order_and_leave_no_process() -> None:
    assert list(bounded(lambda number: [number, "é"], range(300))) == [[n, "é"] for n in range(300)]
    assert list(bounded(str, [])) == []
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_a_process_that_dies_is_told_from_one_that_is_slow() -> None:
    with pytest.raises(OutOfBoundsError, match="its process ended \\(signal 9\\)"):
        list(bounded(lambda number: os.kill(os.getpid(), number), [signal.SIGKILL]))


def test_an_interrupt_ends_the_process_too() -> None:
    """The parent waits in a read; Ctrl-C has to come through, and no process may stay."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.2)
    try:
        with pytest.raises(KeyboardInterrupt):
            list(bounded(time.sleep, [600]))
    finally:
        signal.signal(signal.SIGALRM, before)
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def damage(folder: Path, change: Callable[[dict], object]) -> None:
    inner = json.loads((folder / "tokenizer.json").read_text())
    change(inner)
    (folder / "tokenizer.json").write_text(json.dumps(inner))


def missing() -> dict:
    return {"SpecialToken": {"id": "missing", "type_id": 0}}
