"""Run folders of fake engines that reports over runs are made of, and edits to them."""

from __future__ import annotations

import itertools
import json
import random
import shutil
from collections.abc import Callable
from math import prod
from pathlib import Path
from typing import Any

import pytest
import yaml
from fake_engine import Behaviour, FakeEngine

from hydraspec.config.schema import MethodConfig, RunConfig
from hydraspec.lab import run as run_module

Use = Callable[[FakeEngine], FakeEngine]
JOBS = (("eagle3", 3, (0,)), ("gemma4_mtp", 3, (3, 2)), ("none", 0, (0,)))


@pytest.fixture
def studied(
    config: RunConfig, use_engine: Use, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """Jobs 0 (no draft accepted), 1 and 2 (without drafts). Run once, and copied for each test."""
    kept = tmp_path_factory.getbasetemp() / "studied_fake_runs"
    if not kept.exists():
        for number, (method, drafts, accepted) in enumerate(JOBS):
            config.method = MethodConfig(name=method, num_speculative_tokens=drafts)
            behaviour = Behaviour(accepted=accepted)
            use_engine(FakeEngine(behaviour, method=method, num_speculative_tokens=drafts))
            run_module.run(config, run_dir=kept / str(number), overrides=[], quiet=True)
    return Path(shutil.copytree(kept, tmp_path / "sweep"))


def copied(run: Path, name: str, **changes: Any) -> Path:
    """A copy of a run or a sweep beside it; a run with these changes of `configure`."""
    made = Path(shutil.copytree(run, run.parent / name))
    return configure(made, **changes) if changes else made


def summary_of(run: Path) -> dict[str, Any]:
    return dict(json.loads((run / "summary.json").read_text(encoding="utf-8")))


def edit(run: Path, **changes: Any) -> Path:
    """A run with other values in its summary."""
    text = json.dumps(summary_of(run) | changes)
    (run / "summary.json").write_text(text, encoding="utf-8")
    return run


def configure(run: Path, **changes: Any) -> Path:
    """A run with other values in config.yaml; __ stands for a dot."""
    path = run / "config.yaml"
    settings = yaml.safe_load(path.read_text(encoding="utf-8"))
    for key, value in changes.items():
        group, _, name = key.rpartition("__")
        (settings[group] if group else settings)[name] = value
    path.write_text(yaml.safe_dump(settings), encoding="utf-8")
    return run


def edit_rows(run: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    """A run whose requests were changed, each by `change`."""
    path = run / "requests.jsonl"
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    for row in rows:
        change(row)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return run


def change_prompts(run: Path) -> Path:
    """A run over prompts that are a token longer."""
    return edit_rows(run, lambda row: row["prompt_token_ids"].append(1))


def diverge(run: Path) -> Path:
    """A run whose outputs are not the target's."""
    unknown = ("target_margin", "allowed_margin", "method_token", "baseline_token")
    first = {"request": "task-0", "index": 0, "position": 3, **dict.fromkeys(unknown)}
    found = {"verdict": "diverged", "first_beyond_margin": first}
    return edit(run, lossless=summary_of(run)["lossless"] | found)


def slow_down(run: Path, factor: float) -> None:
    """The method's times of each request multiplied, with some noise."""
    noise = itertools.cycle((1.0, 1.01, 1.02))

    def change(row: dict[str, Any]) -> None:
        row["decode_ms"] = row["baseline"]["decode_ms"] * factor * next(noise)

    edit_rows(run, change)


def divide(run: Path, name: str, *, time: float, **ranks: int) -> Path:
    """A run as it is on another split, `name`: all times of its method and its baseline, and of its
    summary, multiplied by `time`."""
    sizes = {"tensor": 1, "pipeline": 1, "data": 1} | ranks
    configure(
        run, **{f"parallelism__{key}": value for key, value in (sizes | {"name": name}).items()}
    )
    summary = summary_of(run)
    sides = [summary, *([summary["baseline"]] if summary["baseline"] else [])]
    for side in sides:
        side["output_tokens_per_second"] /= time
        side["time_per_output_token_ms"] *= time
    summary["parallelism"] = {**sizes, "num_devices": prod(sizes.values())}
    edit(run, **summary)
    stretch(run, time)
    return run


def stretch(run: Path, time: float) -> None:
    """All times of each request multiplied: a slower machine."""

    def change(row: dict[str, Any]) -> None:
        for side in (row, row["baseline"]):
            if side:
                side["decode_ms"] *= time

    edit_rows(run, change)


def damage(sweep: Path, seed: int) -> None:
    """Change one file of one job: cut, replaced, or with a random key dropped or changed."""
    rng = random.Random(seed)
    names = ("summary.json", "requests.jsonl", "config.yaml", "env.json")
    file = sweep / rng.choice("012") / rng.choice(names)
    text, how = file.read_text(encoding="utf-8"), rng.random()
    if how < 0.2:
        changed = text[: rng.randrange(len(text) + 1)]
    elif how < 0.3:
        changed = rng.choice(["", "[]", "1", "null", "{}", "\x00", "- a\n"])
    elif file.suffix == ".jsonl":
        lines = text.splitlines()
        place = rng.randrange(len(lines))
        lines[place] = json.dumps(_changed(json.loads(lines[place]), rng))
        changed = "\n".join(lines) + "\n"
    else:  # JSON is YAML
        changed = json.dumps(_changed(yaml.safe_load(text), rng))
    file.write_text(changed, encoding="utf-8")


def _changed(tree: Any, rng: random.Random) -> Any:
    """One random place in nested values dropped or replaced."""
    parent, key, here = None, None, tree
    while isinstance(here, dict | list) and here and rng.random() < 0.8:
        parent = here
        key = rng.choice(list(here) if isinstance(here, dict) else range(len(here)))
        here = here[key]
    if parent is None:
        return rng.choice([[], {}, None, 1, "x"])
    if isinstance(parent, dict) and rng.random() < 0.3:
        del parent[key]
    else:
        parent[key] = rng.choice([None, "x", -1, 0, [], {}, 1e308, True, "<b>"])
    return tree
