"""Examinations from prompt to doctor.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hydraspec.analysis.doctor import run as examination
from hydraspec.doctor import main

ZOO = ["target=tiny_mistral", "method=eagle", "engine.device=cpu", "tracker=none"]


def prompts(folder: Path, *, plain: bool) -> Path:
    """The zoo's first prompts, as messages or as the text alone."""
    source = Path(examination.__file__).parents[2] / "zoo" / "data" / "tiny.jsonl"
    lines = [json.loads(line) for line in source.read_text().splitlines()[:12]]
    file = folder / "prompts.jsonl"
    with file.open("w") as out:
        for line in lines:
            text = line["messages"][0]["content"]
            out.write(json.dumps({"prompt": text} if plain else {"messages": line["messages"]}))
            out.write("\n")
    return file


def examined(tmp_path: Path, *typed: str, plain: bool = False) -> dict:  # type: ignore[type-arg]
    file, folder = prompts(tmp_path, plain=plain), tmp_path / "run"
    overrides = ["workload=jsonl", f"workload.path={file}", f"hydra.run.dir={folder}", *typed]
    assert main([*ZOO, *overrides]) == 0
    found = json.loads((folder / "doctor.json").read_text())
    assert (folder / "config.yaml").is_file()
    assert isinstance(found, dict)
    return found


@pytest.mark.slow
def test_plain_prompts_want_the_chat_template(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = examined(tmp_path, plain=True)
    assert found["verdict"] == "convention"
    assert [row["cause"] for row in found["causes"]] == ["chat_template"]
    assert "chat template" in found["causes"][0]["tried"]
    assert found["best_acceptance"] > 2.5 > found["acceptance"]
    printed = "".join(capsys.readouterr().out.split())  # lines are wrapped
    assert "".join(found["sentence"].split()) in printed
    for title in (
        "tokens before the draft",
        "what the target's next token is",
        "place in the output",
    ):
        assert f"By{title.replace(' ', '')}" in printed


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "method"),
    [("tiny_gemma4", "eagle3"), ("tiny_deepseek", "mtp"), ("tiny_gemma4_moe", "gemma4_mtp")],
)
def test_healthy_pairs_are_named_healthy(target: str, method: str, tmp_path: Path) -> None:
    found = examined(tmp_path, f"target={target}", f"method={method}")
    assert found["verdict"] == "healthy"
    assert found["causes"] == []
    assert found["figures"]["ceilings"]["top_5"] >= found["acceptance"] > 1.5
    assert 0 < found["draft_share_of_step"] < 1
    assert found["tensors"]["read"]


@pytest.mark.slow
def test_a_template_of_another_family_is_named(tmp_path: Path) -> None:
    """The target's folder with ChatML in place of its own turns."""
    import shutil

    from hydraspec.models.checkpoint.reader import resolve_folder

    folder = tmp_path / "target"
    shutil.copytree(resolve_folder("zoo:tiny_mistral"), folder)
    (folder / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] }}"
        "{{ '<|im_end|>\n' }}{% endfor %}{{ '<|im_start|>assistant\n' }}"
    )
    found = examined(
        tmp_path, f"target.checkpoint={folder}", "method.checkpoint=zoo:tiny_mistral-eagle"
    )
    assert found["causes"][0]["cause"] == "chat_template"
    assert found["causes"][0]["tried"] == "Gemma 4's chat template"
