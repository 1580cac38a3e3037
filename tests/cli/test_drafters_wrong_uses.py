"""Wrong uses of dflash2, suffix and n-gram, of their workloads and of experiment=drafters, as typed
on the command line: the exit status and the one message of each.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from hydraspec.__main__ import main
from hydraspec.cli.compose import plan
from hydraspec.engine.run.loading import load
from hydraspec.errors import UserError
from hydraspec.factory import resolve_drafter
from hydraspec.models.checkpoint.reader import resolve_folder
from hydraspec.workloads import reading

QWEN = "tracker=none engine.device=cpu target=tiny_qwen3 target.dtype=float32"
DRAFTERS = "tracker=none engine.device=cpu experiment=drafters"


def refused(typed: str, *, opens: str = "nothing") -> UserError:
    """The error at which a command ends, whose jobs go as far as they must to find it."""

    def run() -> None:
        for job in plan(typed.split(), multirun="experiment" in typed).jobs:
            resolve_drafter(job.config)
            if opens == "workload":
                reading.read(job.config)
            elif opens == "checkpoints":
                load(job.config)

    with pytest.raises(UserError) as caught:
        run()
    return caught.value


SUFFIX_KEYS = (
    "allowed: keys of method.options are max_cache_mib, max_cached_requests, max_spec_factor, "
)
KEYS = {
    "a drafter that the target has not": (
        "target=tiny_gemma4 method=dflash2",
        "method=dflash2 without a drafter: target tiny_gemma4 names none\n  allowed: a folder or a "
        "hub id (drafters the target names: gemma4_mtp: zoo:",
    ),
    "an option of another drafter": (
        "method=dflash2 method.options.min_survival=0.5",
        "no key of method=dflash2\n  allowed: keys of method are checkpoint, ",
    ),
    "an option of a drafter without any": (
        "method=dflash2 +method.options.selector_top_k=8",
        "method.options.selector_top_k=8 is no key\n  allowed: method.options has no keys\n",
    ),
    "dflash2 on another engine": (
        "method=dflash2 engine=transformers",
        "method.name=dflash2 is not available with engine=transformers\n  allowed: gemma4_mtp, ",
    ),
    "how drafts are sampled": (
        "method=dflash2 method.draft_sampling=sampled",
        "method.draft_sampling=sampled is no choice\n  allowed: greedy, probabilistic\n",
    ),
    "vLLM's name of the method": (
        "method=suffix_decoding",
        "to do: did you mean method=suffix?",
    ),
    "another name of n-gram": ("method=ngram_gpu", "did you mean method=ngram?"),
    "vLLM's name of a key": (
        "method=suffix method.options.suffix_decoding_max_tree_depth=8",
        "did you mean method.options.max_tree_depth?",
    ),
    "K chosen for each step": (
        "method=suffix method.num_speculative_tokens=auto",
        "each request has its own number of drafts in each step\n  allowed: 1 to 32 with",
    ),
    "no drafts": (
        "method=suffix method.num_speculative_tokens=0",
        "method.num_speculative_tokens=0 is out of range\n  allowed: 1 to 32",
    ),
    "more outputs than are kept": (
        "method=suffix method.options.max_cached_requests=2000000",
        "max_cached_requests=2000000 is out of range\n  allowed: 0 to 1000000\n",
    ),
    "a probability above 1": (
        "method=suffix method.options.min_token_prob=10",
        "method.options.min_token_prob=10.0 is out of range\n  allowed: 0 to 1\n",
    ),
    "an option of n-gram": (
        "method=suffix method.options.prompt_lookup_max=3",
        f"prompt_lookup_max=3 is no key of method=suffix\n  {SUFFIX_KEYS}",
    ),
    "a shortest match above the longest": (
        "method=ngram method.options.prompt_lookup_min=6",
        "prompt_lookup_min=6 is above method.options.prompt_lookup_max=5\n  allowed: 1 to 5\n",
    ),
    "a match that is no number": (
        "method=ngram method.options.prompt_lookup_max=two",
        "method.options.prompt_lookup_max=two is text\n  allowed: a whole number\n",
    ),
    "costs without use": (
        "method=ngram method.costs=costs.json",
        "method.costs=costs.json has no meaning with method.num_speculative_tokens=3\n",
    ),
    "a misspelt workload": ("workload=edits", "did you mean workload=editing?"),
    "a key of other workloads": (
        "workload=editing workload.category=code",
        "no key of workload=editing\n  allowed: keys of workload are burstiness, concurrency, ",
    ),
    "no path of what ships": (
        "workload=editing workload.path=null",
        "workload.path=null names no file\n  allowed: a file of JSON lines, zoo:tiny or zoo:edit",
    ),
    "SPEED-Bench without its file": (
        "workload=speed_bench",
        "to do: add workload.path=<file.jsonl>; the file: qualitative.jsonl or throughput_<n>k",
    ),
    "two categories": (
        "workload=speed_bench workload.path=f workload.category=[qa,rag]",
        "workload.category=[qa, rag] is a list\n  allowed: text, or null\n",
    ),
}
EXPERIMENT = {
    "misspelt": ("experiment=drafter", "did you mean experiment=drafters?"),
    "a drafter that there is not": (f"{DRAFTERS} method=eagle3,dflash3", "method=dflash3 is no "),
    "no request at once": (
        f"{DRAFTERS} workload.concurrency=0,4",
        "workload.concurrency=0 is out of range\n  allowed: 1 or more, or null",
    ),
    "drafters that another engine does not run": (
        f"{DRAFTERS} engine=transformers",
        "is not available with engine=transformers\n  allowed: gemma4_mtp, none\n",
    ),
    "K of a step with suffix": (
        f"{DRAFTERS} method.num_speculative_tokens=auto",
        "each request has its own number of drafts in each step\n  allowed: 1 to 32 with method=s",
    ),
}


@pytest.mark.parametrize("name", KEYS)
def test_keys(name: str) -> None:
    typed, says = KEYS[name]
    error = refused(f"{QWEN} {typed}")
    assert error.exit_code == 2
    assert says in str(error)
    assert len(str(error).splitlines()) == 3


@pytest.mark.parametrize("name", EXPERIMENT)
def test_experiment(name: str) -> None:
    typed, says = EXPERIMENT[name]
    error = refused(typed)
    assert error.exit_code == 2
    assert says in str(error)


HEAD = "zoo:tiny_qwen3-dflash2"
FOLDERS: dict[str, tuple[dict[str, object], str, str]] = {
    "for another method": (
        {"architectures": ["DFlashDraftModel"]},
        "method=dflash2",
        "holds a drafter for method=dflash (z-lab): choose method=dflash, or give another",
    ),
    "for another method, found by its folder": (
        {"architectures": ["DFlashDraftModel"]},
        "method=auto",
        "surplus tensors: candidate_selector.hidden_projection.weight, ",
    ),
    "more candidates than tokens": (
        {"selector_top_k": 5000},
        "method=dflash2",
        "dflash_config.selector_top_k is 5000; expected at most the vocabulary's size, 768",
    ),
    "a selector of another rank": (
        {"selector_rank": 16},
        "method=dflash2",
        "candidate_selector.hidden_projection.weight is [32, 80], config.json says [16, 80]",
    ),
    "no convolution": (
        {"conv_kernel_size": 0},
        "method=dflash2",
        "dflash_config.conv_kernel_size is 0; expected an integer of at least 1",
    ),
    "groups that do not fit": (
        {"conv_group_size": 7},
        "method=dflash2",
        "dflash_config.conv_group_size is 7; expected a divisor of hidden_size, 80",
    ),
    "layers that the target has not": (
        {"target_layer_ids": [1, 8, 40]},
        "method=dflash2",
        "the target has 18 layers, so [41] is not among 0 to 18",
    ),
    "made for another target": (
        {"num_target_layers": 16},
        "method=dflash2",
        "was made for a target whose number of layers is 16 (num_target_layers); this target's is",
    ),
}


def damaged(folder: Path, changed: dict[str, object]) -> Path:
    """A copy of the head with other values in its config, at the top or in dflash_config."""
    shutil.copytree(resolve_folder(HEAD), folder)
    file = folder / "config.json"
    values = json.loads(file.read_text())
    for key, value in changed.items():
        (values["dflash_config"] if key in values["dflash_config"] else values)[key] = value
    file.write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize("name", FOLDERS)
def test_folders(name: str, tmp_path: Path) -> None:
    changed, typed, says = FOLDERS[name]
    folder = damaged(tmp_path / "head", changed)
    error = refused(f"{QWEN} {typed} method.checkpoint={folder}", opens="checkpoints")
    assert error.exit_code == 3
    assert says in str(error)
    assert str(folder) in str(error)


def test_a_head_without_its_selector(tmp_path: Path) -> None:
    folder = damaged(tmp_path / "head", {})
    file = folder / "model.safetensors"
    save_file({k: v for k, v in load_file(file).items() if "selector" not in k}, file)
    error = refused(f"{QWEN} method=dflash2 method.checkpoint={folder}", opens="checkpoints")
    assert error.exit_code == 3
    assert "missing tensors: candidate_selector.hidden_projection.weight, " in str(error)


WORKLOADS = {
    "what does not ship": (
        "workload=editing workload.path=zoo:edit",
        "ships zoo:editing, zoo:tiny",
    ),
    "no copy of SPEED-Bench": (
        "workload=speed_bench workload.path=nvidia/SPEED-Bench",
        "workload.path=nvidia/SPEED-Bench cannot be read: No such file or directory",
    ),
    "the zoo as SPEED-Bench": (
        "workload=speed_bench workload.path=zoo:editing",
        "zoo:editing:1: question_id: null is not allowed; it must be a text",
    ),
    "SPEED-Bench as released": (
        "workload=speed_bench workload.path={released}",
        "the prompts of 1 of 1 rows are placeholders, whose text is with its sources; the file ",
    ),
    "SPEED-Bench as another set": (
        "workload=mt_bench workload.path={released}",
        "a placeholder of SPEED-Bench, which is workload=speed_bench",
    ),
}


@pytest.mark.parametrize("name", WORKLOADS)
def test_workloads(name: str, tmp_path: Path) -> None:
    typed, says = WORKLOADS[name]
    file = tmp_path / "released.jsonl"
    placeholder = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"
    file.write_text(json.dumps({"question_id": "a", "category": "qa", "turns": [placeholder]}))
    error = refused(f"{QWEN} method=suffix {typed.format(released=file)}", opens="workload")
    assert error.exit_code == 3
    assert says in str(error)


def test_jobs_that_fail_alike_say_it_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = f"{DRAFTERS} method=dflash2 method.num_speculative_tokens=9 hydra.sweep.dir={tmp_path}"
    assert main(typed.split()) == 2
    said = capsys.readouterr().err
    assert said.count("is above what a block of drafter") == 1
    assert "job 1 fails as job 0\n" in said
    assert "job 2 fails as job 0\n" in said


def test_more_drafts_than_a_block_holds_names_the_key_that_was_typed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    most = "method.num_speculative_tokens=auto method.max_speculative_tokens=9"
    assert main(f"{QWEN} method=dflash {most} hydra.run.dir={tmp_path / 'run'}".split()) == 2
    assert "method.max_speculative_tokens=9 is above what a block" in capsys.readouterr().err
