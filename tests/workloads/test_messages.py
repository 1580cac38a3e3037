"""Messages of text and pictures: their parts, and files beside the workload's, outside of which
nothing is read."""

from __future__ import annotations

import base64
import json
import os
from pathlib import Path
from typing import Any

import pytest

from hydraspec.config.schema import RunConfig, WorkloadConfig
from hydraspec.pictures import MAX_PICTURE_BYTES, Picture
from hydraspec.types import Request, SamplingParams, WorkloadError
from hydraspec.workloads.files import folder_of
from hydraspec.workloads.lines import parse_line
from hydraspec.workloads.pictures import read_picture
from hydraspec.workloads.reading import read

CONTENT = b"a picture, for all that this room knows"
TEXT = {"type": "text", "text": "What is this?"}
IMAGE = {"type": "image", "image": "cat.png"}
URL = "data:image/png;base64," + base64.b64encode(CONTENT).decode()


def parse(*contents: object, folder: Path | None = None, role: str = "user") -> Request:
    messages = [{"role": role, "content": content} for content in contents]
    line = json.dumps({"messages": messages}).encode()
    (request,) = parse_line(
        line, place="f:1", index=0, number=0, defaults=lambda i: SamplingParams(), folder=folder
    )
    return request


def test_parts_keep_their_order_and_pictures_are_read(tmp_path: Path) -> None:
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "cat.png").write_bytes(CONTENT)
    (tmp_path / "dog").write_bytes(CONTENT * 2)
    cat, dog = ({"type": "image", "image": name} for name in ("pictures/cat.png", "./dog"))
    request = parse([TEXT, cat, {"type": "image", "image": URL}, TEXT, dog], folder=tmp_path)
    assert request.messages == [
        {
            "role": "user",
            "content": [TEXT, {"type": "image"}, {"type": "image"}, TEXT, {"type": "image"}],
        }
    ]
    assert request.pictures == (
        Picture(name="pictures/cat.png", content=CONTENT),
        Picture(name="data URL", content=CONTENT),
        Picture(name="./dog", content=CONTENT * 2),
    )


def test_messages_of_text_are_as_they_were() -> None:
    request = parse("a")
    assert (request.messages, request.pictures) == ([{"role": "user", "content": "a"}], ())
    assert parse([TEXT]).messages == [{"role": "user", "content": [TEXT]}]


BAD_PARTS: dict[str, tuple[Any, str]] = {
    "no parts": ([], "messages: {"),
    "no object": (["a"], 'messages[0].content[0]: "a" is not allowed; it must be {"type": "text"'),
    "no type": ([{"text": "a"}], "messages[0].content[0]: {"),
    "type no string": ([{"type": ["text"], "text": "a"}], "messages[0].content[0]: {"),
    "text missing": ([{"type": "text"}], "each with these keys and strings alone"),
    "blank text": ([{"type": "text", "text": " "}], "content[0].text: "),
}


@pytest.mark.parametrize("name", BAD_PARTS)
def test_parts_that_are_none_refuse_the_line(name: str) -> None:
    content, message = BAD_PARTS[name]
    with pytest.raises(WorkloadError) as caught:
        parse(content)
    assert str(caught.value).startswith("f:1: messages")
    assert message in str(caught.value)


OTHER_PARTS: dict[str, tuple[dict[str, Any], str]] = {
    "audio": ({"type": "input_audio"}, "a part of type 'input_audio' is not read"),
    "video": ({"type": "video", "video": "a"}, "a part of type 'video' is not read"),
    "image_url": ({"type": "image_url", "image_url": {"url": URL}}, "of type 'image_url' is not"),
    "a long type": ({"type": "x" * 50}, f"of type '{'x' * 37}...' is not read"),
    "image missing": ({"type": "image"}, "it has other keys, or no string"),
    "image no string": ({"type": "image", "image": 3}, "it has other keys, or no string"),
    "another key": ({**IMAGE, "detail": "high"}, "it has other keys, or no string"),
}


@pytest.mark.parametrize("name", OTHER_PARTS)
def test_parts_that_are_not_read_are_their_requests_error(name: str) -> None:
    part, message = OTHER_PARTS[name]
    (found,) = parse([TEXT, part]).pictures
    assert (found.name, found.content) == ("messages[0].content[1]", b"")
    assert message in (found.error or "")
    assert "\n" not in (found.error or "")


@pytest.mark.parametrize("role", ["system", "tool"])
def test_only_users_show_pictures(role: str) -> None:
    assert parse([TEXT], role=role).messages
    (found,) = parse([TEXT, IMAGE], role=role).pictures
    assert f"the message's role is '{role}'" in (found.error or "")


# ------------------------------------------------------------------ files

BESIDE = "give a path that begins in the folder of the workload's file"
BAD_SOURCES = {
    "": "the path is empty",
    " ": "the path is empty",
    "a\0.png": "or has a null character",
    "/etc/hostname": f"an absolute path is not read; {BESIDE}",
    "//host/share/a.png": "an absolute path",
    "C:\\a.png": "an absolute path",
    "C:a.png": "an absolute path",
    "\\a.png": "an absolute path",
    "~/a.png": "an absolute path",
    "../outside.png": f'a path with ".." is not read; {BESIDE}',
    "pictures/../../outside.png": 'a path with ".."',
    "pictures\\..\\..\\outside.png": 'a path with ".."',
    "pictures/../cat.png": 'a path with ".."',  # inside, but may not be where links are
    "http://host/a.png": "a URL is not read; save the picture beside the workload's file",
    "HTTPS://host/a.png": "a URL is not read",
    "file:cat.png": "a URL is not read",
    "none.png": f"cannot be read: No such file or directory; {BESIDE}",
    "a" * 300: "cannot be read: File name too long",
    "cat.png/more": "cannot be read: Not a directory",
    "pictures": "a folder is no picture",
    "pipe": "a FIFO is no picture",
    "large.png": f"more than {MAX_PICTURE_BYTES} bytes",
    "outside": "a link that leaves the workload's folder is not followed",
    "away/outside.png": "a link that leaves the workload's folder is not followed",
    "circle": "cannot be read",
    "data:,": "write it as data:<type>;base64,",
    "data:image/png,abc": "write it as data:<type>;base64,",
    "data:image/gif;base64,AAAA": "of type image/png or image/jpeg or image/webp",
    "data:text/html;base64,AAAA": "write it as data:<type>;base64,",
    "data:image/png;base64,A": "not base64: ",
    "data:image/png;base64,AA AA": "not base64: ",
    "data:image/png;base64," + "A" * (4 * MAX_PICTURE_BYTES // 3 + 8): "more than 33554432 bytes",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workload's folder, with a file outside of it, links, a FIFO and a large file."""
    outer = tmp_path_factory.mktemp("outer")
    (outer / "outside.png").write_bytes(CONTENT)
    inner = outer / "inner"
    (inner / "pictures").mkdir(parents=True)
    (inner / "cat.png").write_bytes(CONTENT)
    (inner / "outside").symlink_to(outer / "outside.png")
    (inner / "away").symlink_to(outer)
    (inner / "within").symlink_to(inner / "cat.png")
    (inner / "circle").symlink_to(inner / "circle")
    os.mkfifo(inner / "pipe")
    with (inner / "large.png").open("wb") as large:
        large.truncate(MAX_PICTURE_BYTES + 1)
    return inner


@pytest.mark.parametrize("source", BAD_SOURCES, ids=lambda source: source[:40])
@pytest.mark.timeout(20)
def test_nothing_outside_the_folder_is_read(source: str, folder: Path) -> None:
    found = read_picture(source, folder)
    assert found.content == b""
    assert BAD_SOURCES[source] in (found.error or "")
    assert "\n" not in (found.error or "")
    assert len(found.name) <= 80


def test_links_inside_the_folder_and_to_the_folder_are_followed(folder: Path) -> None:
    assert read_picture("within", folder).content == CONTENT
    linked = folder.parent / "linked"
    linked.symlink_to(folder)
    assert read_picture("cat.png", linked).content == CONTENT


def test_a_workload_without_a_file_has_no_folder_of_pictures() -> None:
    assert folder_of(WorkloadConfig(name="tiny", path="zoo:tiny")) is None
    assert "this workload is no file" in (read_picture("cat.png", None).error or "")
    assert read_picture(URL, None).content == CONTENT


def test_paths_begin_in_the_folder_of_the_workloads_file(folder: Path, config: RunConfig) -> None:
    parts = (IMAGE, {"type": "image", "image": "../outside.png"})
    lines = [{"messages": [{"role": "user", "content": [TEXT, part]}]} for part in parts]
    path = folder / "lines.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)))
    config.workload.path = str(path)
    workload = read(config)
    assert workload is not None
    fine, bad = (request.pictures[0] for request in workload.requests)
    assert (fine.content, fine.error) == (CONTENT, None)
    assert bad.error is not None
