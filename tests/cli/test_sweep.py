"""Results in a sweep's folder that a job takes over. Whole commands are in test_main.py."""

import json
import os
import shutil
import time

import pytest
from omegaconf import OmegaConf

from hydraspec.cli.compose import plan
from hydraspec.cli.sweep import check_folder, find_finished, note_idle_seed, take_over
from hydraspec.config import to_dict
from hydraspec.errors import ConfigurationError

TICK = 0.02  # seconds; a file system's clock is that coarse


@pytest.fixture
def job(tmp_path):
    """A job that reads local files, and the folder that it finished in."""
    target = tmp_path / "target"
    target.mkdir()
    (target / "config.json").write_text("{}")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    typed = ["target=custom", f"target.checkpoint={target}", "method=none"]
    config = (
        plan([*typed, "workload=jsonl", f"workload.path={tmp_path}/prompts.jsonl"]).jobs[0].config
    )
    time.sleep(TICK)
    folder = tmp_path / "sweep" / "0"
    folder.mkdir(parents=True)
    write(folder, config, typed)
    time.sleep(TICK)
    return config, folder


def write(folder, config, typed):
    (folder / "config.yaml").write_text(OmegaConf.to_yaml(to_dict(config)))
    (folder / "overrides.yaml").write_text(OmegaConf.to_yaml(typed))
    summary = {"status": "ok", "warnings": config.warnings}
    (folder / "summary.json").write_text(json.dumps(summary))


def edit(tmp_path):
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "b"}\n')


def put_an_older_file_in_its_place(tmp_path):
    older = tmp_path / "older"
    older.write_text('{"prompt": "b"}\n')
    os.utime(older, (0, 0))
    time.sleep(TICK)
    older.rename(tmp_path / "prompts.jsonl")


def link_to_an_older_file(tmp_path):
    (tmp_path / "prompts.jsonl").unlink()
    (tmp_path / "prompts.jsonl").symlink_to(tmp_path / "target" / "config.json")


def add_weights(tmp_path):
    (tmp_path / "target" / "model.safetensors").touch()


@pytest.mark.parametrize(
    "change", [edit, put_an_older_file_in_its_place, link_to_an_older_file, add_weights]
)
def test_a_job_whose_files_changed_is_not_finished(job, tmp_path, change, caplog):
    caplog.set_level("INFO")
    config, folder = job
    assert find_finished(folder.parent, config) == folder
    change(tmp_path)
    assert find_finished(folder.parent, config) is None
    assert "has changed since job 0 ran" in caplog.text


def test_a_result_that_was_taken_over_is_not_taken_over_again(job):
    """Catches two jobs that each name the other, once the one that ran is deleted."""
    config, folder = job
    copy = folder.with_name("1")
    copy.mkdir()
    take_over(folder, copy, [])
    assert find_finished(folder.parent, config) == folder
    shutil.rmtree(folder)
    assert find_finished(folder.parent, config) is None


def test_a_benchmark_is_taken_over_as_a_run_is(job):
    """Catches benchmarks that a sweep measures again each time it is resumed."""
    config, folder = job
    result = {"schema_version": 1, "status": "interrupted", "parts": [], "warnings": []}
    (folder / "summary.json").unlink()
    (folder / "bench.json").write_text(json.dumps(result))
    assert find_finished(folder.parent, config) is None
    (folder / "bench.json").write_text(json.dumps(result | {"status": "ok"}))
    assert find_finished(folder.parent, config) == folder
    copy = folder.with_name("1")
    taken = take_over(folder, copy, ["seed=1"])
    assert taken == result | {"status": "ok", "reused_from": "0"}
    assert json.loads((copy / "bench.json").read_text()) == taken
    assert not (copy / "summary.json").exists()
    assert take_over(folder, folder, []) == result | {"status": "ok"}


def test_warnings_that_are_taken_over_name_what_was_typed_here(tmp_path):
    typed = ["method=none", "method.num_speculative_tokens=1,3"]
    jobs = [job.config for job in plan(typed, multirun=True).jobs]
    for name, config in zip("01", jobs, strict=True):
        (tmp_path / name).mkdir()
        write(tmp_path / name, config, [f"method.num_speculative_tokens={2 * int(name) + 1}"])
    taken = take_over(tmp_path / "0", tmp_path / "1", ["method.num_speculative_tokens=3"])
    assert taken["reused_from"] == "0"
    assert taken["warnings"] == jobs[1].warnings != jobs[0].warnings


LINES = {
    "greedy": {"prompt": "a"},
    "sampled": {"prompt": "a", "sampling": {"temperature": 0.7}},
    "own seed": {"prompt": "a", "sampling": {"temperature": 0.7, "seed": 3}},
}
OF_FILE = ["workload=jsonl", "workload.path=lines.jsonl"]
SYNTHETIC = ["method.verification=synthetic", "method.synthetic_acceptance_length=2"]


@pytest.mark.parametrize(
    ("lines", "typed", "is_idle"),
    [
        (["greedy"], ["seed=1,2"], True),
        (["greedy"], ["seed=1"], False),
        (["greedy"], ["seed=1,2", "sampling=stochastic"], False),
        (["greedy", "sampled"], ["seed=1,2", *OF_FILE], False),
        (["greedy", "own seed"], ["seed=1,2", *OF_FILE], True),
        (["greedy"], ["seed=1,2", "workload=random"], False),
        (["greedy"], ["seed=1,2", "target.weights=random"], False),
        (["greedy"], ["seed=1,2", *SYNTHETIC], False),
        (["greedy"], ["seed=1,2", "bench=decode", "bench.batches=[1]"], False),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_seed_without_effect_is_warned_about(lines, typed, is_idle, tmp_path, monkeypatch):
    """Catches two jobs with the same outputs taken for two samples; sampled runs are not warned."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lines.jsonl").write_text("".join(json.dumps(LINES[x]) + "\n" for x in lines))
    jobs = [job.config for job in plan(typed, multirun=True).jobs]
    before = list(jobs[0].warnings)
    note_idle_seed(jobs[0], [job.seed for job in jobs])
    added = jobs[0].warnings[len(before) :]
    assert [text.startswith("seed=1,2 changes nothing: ") for text in added] == [True] * is_idle


@pytest.mark.parametrize(
    "damage",
    [b"a: [", b"\xff\xfe", b"- 1", b"a: ${", b"x: " + b"[" * 9000],
    ids=lambda d: repr(d[:6]),
)
def test_a_job_whose_configuration_is_damaged_is_one_message(tmp_path, damage):
    """Catches the traceback of PyYAML, and a job that is run again over another's results."""
    file = tmp_path / "0" / "config.yaml"
    file.parent.mkdir()
    file.write_bytes(damage)
    config = plan(["seed=1"]).jobs[0].config
    with pytest.raises(ConfigurationError) as refused:
        check_folder(tmp_path, {0: config})
    first, _, remedy = str(refused.value).splitlines()
    assert f"holds a job whose configuration cannot be read: {file}: " in first
    assert f"remove {file.parent}" in remedy
    (file.parent / "summary.json").write_text('{"status": "ok"}')
    assert find_finished(tmp_path, config) is None
