"""A run over pictures: those that cannot be used are errors of their requests alone, and the files
of the run say what the target has read."""

from __future__ import annotations

import base64
import json
import re
from html import unescape
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from picture_folders import drawn, encoded, write_wrapper
from PIL import Image as Pillow

import hydraspec
from hydraspec.errors import WorkloadError
from hydraspec.models.pictures.decoding import decode
from hydraspec.study.thumbnails import MAX_SIDE

SMALL, WIDE = drawn(20, 30), drawn(30, 400)
GLASS = Pillow.fromarray(np.dstack([SMALL, np.full((20, 30), 9, np.uint8)]))
OTHER_FRAME = {"save_all": True, "append_images": [Pillow.fromarray(255 - SMALL)]}
HOSTILE = '"><script>alert(1)<script>.png'


def url(content: bytes, kind: str = "png") -> str:
    return f"data:image/{kind};base64,{base64.b64encode(content).decode()}"


FILES = {
    "good.png": encoded("PNG", SMALL),
    "good.jpg": encoded("JPEG", SMALL),
    HOSTILE: encoded("WEBP", WIDE, lossless=True),
    "text.png": b"no picture",
    "empty.png": b"",
    "cut.png": encoded("PNG", SMALL)[:-300],
    "cut.jpg": encoded("JPEG", SMALL)[:-300],
    "cut.webp": encoded("WEBP", SMALL)[:-200],
    "a.gif": encoded("GIF", SMALL),
    "a.bmp": encoded("BMP", SMALL),
    "moves.png": encoded("PNG", SMALL, **OTHER_FRAME),
    "moves.webp": encoded("WEBP", SMALL, **OTHER_FRAME),
    "glass.png": encoded("PNG", GLASS),
    "print.jpg": encoded("JPEG", Pillow.fromarray(SMALL).convert("CMYK")),
    "deep.png": encoded("PNG", Pillow.fromarray(SMALL[..., 0].astype(np.uint16))),
}
BAD = {  # image of a part → words of its request's error
    "text.png": "no picture in PNG, JPEG or WebP",
    "empty.png": "is empty",
    "cut.png": "damaged or cut short",
    "cut.jpg": "damaged or cut short",
    "cut.webp": "damaged or cut short",
    "a.gif": "no picture in PNG",
    "a.bmp": "no picture in PNG",
    "moves.png": "2 pictures or frames",
    "moves.webp": "2 pictures or frames",
    "glass.png": "transparent pixels",
    "print.jpg": "mode 'CMYK'",
    "deep.png": "mode 'I;16'",
    "none.png": "cannot be read: No such file",
    "folder": "a folder is no picture",
    "outside.png": "a link that leaves the workload's folder",
    "../good.png": 'a path with ".."',
    "/etc/passwd": "an absolute path is not read",
    "~/good.png": "an absolute path is not read",
    "": "the path is empty",
    "http://localhost/good.png": "a URL is not read",
    "file:///etc/passwd": "a URL is not read",
    "data:image/png;base64,@@": "not base64",
    "data:image/gif;base64,AAAA": "write it as data:<type>;base64",
    url(b"", "jpeg"): "is empty",
    url(encoded("PNG", SMALL)[:60]): "damaged or cut short",
}
IMAGE_PART = {"type": "image", "image": "good.png"}
GOOD = ("good.png", "good.jpg", HOSTILE, url(FILES["good.png"]))


def line(image: object, **more: object) -> dict[str, Any]:
    parts = [{"type": "text", "text": "What?"}, {"type": "image", "image": image}]
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": 2, **more}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("target")
    write_wrapper(folder)
    return folder


def decoded(folder: Path, target: Path, *overrides: str) -> dict[str, Any]:
    own = (f"target.checkpoint={target}", "target.dtype=float32", f"hydra.run.dir={folder}/run")
    others = ("engine=transformers", "method=none", "tracker=none")
    return hydraspec.run(["target=custom", *own, *others, *overrides])


def run(folder: Path, target: Path, lines: list[dict[str, Any]], *overrides: str) -> dict[str, Any]:
    inner = folder / "inner"
    (inner / "folder").mkdir(parents=True)
    for name, content in FILES.items():
        (inner / name).write_bytes(content)
    (folder / "good.png").write_bytes(FILES["good.png"])
    (inner / "outside.png").symlink_to(folder / "good.png")
    (inner / "lines.jsonl").write_text("\n".join(map(json.dumps, lines)))
    workload = ("workload=jsonl", f"workload.path={inner}/lines.jsonl")
    return decoded(folder, target, *workload, *overrides)


def read_rows(folder: Path) -> list[dict[str, Any]]:
    text = (folder / "run" / "requests.jsonl").read_text(encoding="utf-8")
    return [json.loads(row) for row in text.splitlines()]


def test_25_bad_pictures_fail_their_requests_alone(tmp_path: Path, target: Path) -> None:
    assert len(BAD) == 25
    images = [*list(BAD)[:12], *GOOD, *list(BAD)[12:]]
    summary = run(tmp_path, target, [*map(line, images), {"prompt": "2 + 3", "max_tokens": 2}])
    assert summary["status"] == "ok"
    assert (summary["num_requests"], summary["num_errors"]) == (30, 25)
    rows = read_rows(tmp_path)
    for image, row in zip(images, rows, strict=False):
        if image not in BAD:
            assert (row["error"], len(row["output_token_ids"])) == (None, 2)
            continue
        assert row["finish_reason"] == "error"
        assert row["error"].startswith("picture 1 of its messages (")
        assert BAD[image] in row["error"]
        assert "\n" not in row["error"]
        assert (row["num_image_tokens"], row["output_token_ids"]) == (0, [])
    tokens = [row["num_image_tokens"] for row in rows]
    assert tokens[12:16] == [60, 60, 2 * 30, 60]
    assert (tokens[-1], sum(tokens)) == (0, summary["num_image_tokens"])
    assert [row["spans"][0]["length"] for row in rows[12:16]] == tokens[12:16]


def test_parts_that_are_not_read_fail_their_requests_alone(tmp_path: Path, target: Path) -> None:
    fine = line("good.png")
    lines = [json.loads(json.dumps(fine)) for _ in range(4)]
    lines[1]["messages"][0]["content"][1] = {"type": "video", "video": "a.mp4"}
    lines[2]["messages"].insert(0, {"role": "system", "content": [{**IMAGE_PART}]})
    summary = run(tmp_path, target, lines)
    assert (summary["status"], summary["num_errors"]) == ("ok", 2)
    rows = read_rows(tmp_path)
    assert [row["error"] is None for row in rows] == [True, False, False, True]
    where = "picture 1 of its messages (messages[0].content[{}]): "
    assert rows[1]["error"].startswith(where.format(1) + "a part of type 'video' is not read")
    assert rows[2]["error"].startswith(where.format(0) + "the message's role is 'system'")


def test_if_every_picture_is_bad_the_run_has_failed(tmp_path: Path, target: Path) -> None:
    summary = run(tmp_path, target, [line("none.png"), line("/etc/passwd")])
    assert (summary["status"], summary["num_errors"]) == ("failed", 2)


def test_the_page_shows_a_few_small_pictures(tmp_path: Path, target: Path) -> None:
    lines = [line(image) for image in GOOD]
    parts = [{"type": "image", "image": "good.png"}] * 7
    lines.append({"messages": [{"role": "user", "content": parts}], "max_tokens": 2})
    run(tmp_path, target, lines)
    page = (tmp_path / "run" / "report.html").read_text()
    assert "<script>alert" not in page
    shown = re.findall(r'<img src="data:image/png;base64,([^"]+)" alt="([^"]*)"', page)
    names = [GOOD[0], GOOD[1], GOOD[2], "data URL", *["good.png"] * 4]
    assert [unescape(name) for _, name in shown] == names
    for content, name in shown:
        pixels = decode(base64.b64decode(content))
        assert max(pixels.shape) <= MAX_SIDE
        source = WIDE if name == shown[2][1] else SMALL
        assert np.abs(pixels.mean(axis=(0, 1)) - source.mean(axis=(0, 1))).max() < 6
    assert "What? [picture]" in page


def test_a_target_without_an_encoder_refuses_the_run(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"lines\.jsonl:2: request 1: its messages have"):
        run(
            tmp_path,
            Path("zoo:tiny_gemma4"),
            [{"prompt": "2 + 3"}, line("good.png")],
            "engine=native",
        )


def test_questions_on_drawn_pictures_are_scored(tmp_path: Path, target: Path) -> None:
    size = ("workload.num_requests=4", "sampling.max_tokens=3")
    summary = decoded(tmp_path, target, "workload=images", *size)
    assert summary["accuracy"]["num_scored"] == 4
    assert list(summary["by_category"]) == ["colour", "count", "place", "more"]
    assert summary["num_image_tokens"] > 5 * 48
