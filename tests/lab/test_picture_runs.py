"""Runs of workload=images from command to summary: native tokens are transformers', with
drafts, small steps and on several ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from picture_folders import wrapper_config, write_wrapper
from tiny_targets import assistant_config

import hydraspec
from hydraspec.pictures import png_url
from hydraspec.workloads.drawn import question

SIZE = ("workload=images", "workload.num_requests=8", "sampling.max_tokens=6")


class Runs:
    """Runs over one random wrapper, whose tokens depend on the pictures."""

    def __init__(self, folder: Path, **how: bool) -> None:
        self._folder, self._num_runs = folder, 0
        write_wrapper(folder / "target", seed=1, **how)
        self.outputs = self.tokens(self.summary("engine=transformers", "method=none"))

    def summary(self, *overrides: str) -> dict[str, Any]:
        self._num_runs += 1
        target = ("target=custom", f"target.checkpoint={self._folder}/target")
        others = ("target.dtype=float32", "tracker=none", "sampling.ignore_eos=true")
        place = f"hydra.run.dir={self._folder}/{self._num_runs}"
        own = any(override.startswith("workload=") for override in overrides)
        return hydraspec.run([*target, *others, place, *(() if own else SIZE), *overrides])

    def tokens(self, summary: dict[str, Any]) -> list[list[int]]:
        assert summary["num_errors"] == 0
        text = (Path(summary["run_dir"]) / "requests.jsonl").read_text(encoding="utf-8")
        return [json.loads(row)["output_token_ids"] for row in text.splitlines()]


KINDS = {
    "causal": {},
    "bidirectional": {"bidirectional": True},
    "unified": {"bidirectional": True, "unified": True},
}


@pytest.fixture(scope="module", params=KINDS)
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"), **KINDS[request.param])


def test_tokens_are_transformers(runs: Runs) -> None:
    found = runs.summary("engine=native", "method=none")
    assert runs.tokens(found) == runs.outputs
    # Of each category two questions, of which some have the same text.
    assert len({tuple(output) for output in runs.outputs}) > 4
    assert found["num_image_tokens"] > 8 * 48


def test_small_steps_and_drafts_change_no_token(runs: Runs) -> None:
    """A step holds little more than one picture."""
    small = ("engine.max_num_batched_tokens=80", "engine.max_num_seqs=4", "workload.concurrency=4")
    found = runs.summary("engine=native", "method=ngram", *small)
    assert runs.tokens(found) == runs.outputs
    assert found["lossless"]["verdict"] == "identical"
    assert found["num_image_tokens"] == found["baseline"]["num_image_tokens"]


@pytest.mark.slow
@pytest.mark.parametrize("parallelism", ["tp2", "pp2", "dp2"])
def test_ranks_change_no_token(runs: Runs, parallelism: str) -> None:
    found = runs.summary("engine=native", "method=none", f"parallelism={parallelism}")
    assert runs.tokens(found) == runs.outputs


def test_later_turns_read_the_pictures_of_earlier_ones(runs: Runs, tmp_path: Path) -> None:
    """Conversations of three turns, with prefix hits that end inside and after pictures."""
    parts = [question(7, index) for index in range(9)]
    lines = []
    for asked in parts:
        content = [{"type": "image", "image": png_url(pixels)} for pixels in asked.pictures[:1]]
        content.append({"type": "text", "text": asked.text})
        lines.append(json.dumps({"messages": [{"role": "user", "content": content}]}))
    path = tmp_path / "lines.jsonl"
    path.write_text("\n".join(lines))
    size = ("workload=multi_turn", f"workload.path={path}", "workload.num_turns=3")
    size = (*size, "workload.num_conversations=3", "sampling.max_tokens=6")
    theirs = runs.summary(*size, "engine=transformers", "method=none")
    ours = runs.summary(*size, "engine=native", "method=ngram")
    assert runs.tokens(ours) == runs.tokens(theirs)
    assert ours["lossless"]["verdict"] == "identical"
    assert ours["num_image_tokens"] == theirs["num_image_tokens"] > 18 * 48
    assert ours["prefix_cache"]["hit_tokens"] > 0


def test_an_assistant_drafts_from_every_place_after_pictures(tmp_path: Path) -> None:
    """In three rounds, each with other pictures, of which the engine has those of the last."""
    runs = Runs(tmp_path, bidirectional=True)
    config = assistant_config(wrapper_config()["text_config"])
    (tmp_path / "assistant").mkdir()
    (tmp_path / "assistant" / "config.json").write_text(json.dumps(config))
    drafter = (f"method.checkpoint={tmp_path}/assistant", "method.weights=random")
    found = runs.summary(
        *("engine=native", "method=gemma4_mtp", *drafter),
        *("workload.concurrency=1", "metrics.all_positions=true"),
    )
    assert runs.tokens(found) == runs.outputs
    assert found["lossless"]["verdict"] == "identical"
    assert found["num_drafts"] > 0
    assert found["teacher_forced"]["num_places"] == 8 * 5  # of each output of six tokens
