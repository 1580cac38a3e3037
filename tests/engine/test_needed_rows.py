"""From the last layer that writes KV on, rows without readers are left out: same tokens, fewer
rows.

On trained targets, above all the one whose last layers share KV, with its assistant. A row left
out wrongly, or taken for another's, shows as another token, draft or logit. float64: no tie turns.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from graph_runs import (
    SHARING,
    assert_same,
    attention_as_on_devices,
    cache_gib,
    graph_config,
    make_graph_engine,
    run_requests,
    zoo_requests,
)
from grids import slow_unless
from recorded_graphs import CalledAgain, RecordedOps
from scenarios import make_engine
from tiny_targets import gemma4_config, load, run_config, write_folder

from hydraspec.config.schema import RunConfig, Weights
from hydraspec.engine.native import NativeEngine
from hydraspec.engine.run import device_runner, inputs
from hydraspec.engine.run.runner import Runner
from hydraspec.engine.schedule.sequence import Sequence
from hydraspec.graphs import GraphBackend
from hydraspec.models.decoder import Decoder
from hydraspec.speculators.none import NoSpeculator
from hydraspec.speculators.registry import build_speculator
from hydraspec.types import Request, SamplingParams, StepPlan

NUM_REQUESTS = 7
ENGINES: dict[str, Callable[[], GraphBackend | None]] = {
    "cpu": lambda: None,
    "eager on a device": CalledAgain,
    "graphs": RecordedOps,
    "graphs in pieces": RecordedOps,
}
MODES = {
    "cpu": "none",
    "eager on a device": "none",
    "graphs": "full_decode_only",
    "graphs in pieces": "full_and_piecewise",
}
# Of every family a target whose last layer writes KV, and what drafts for it.
OTHERS = [
    ("tiny_gemma4", "gemma4_mtp", "eager on a device"),
    ("tiny_gemma4_moe", "none", "cpu"),
    ("tiny_qwen3", "eagle3", "graphs"),
    ("tiny_mistral", "none", "cpu"),
    ("tiny_deepseek", "none", "eager on a device"),
]


def config_of(method: str, mode: str, max_num_batched_tokens: int) -> RunConfig:
    pair = SHARING if method == "gemma4_mtp" else (SHARING[0], None)
    return graph_config(method, mode, pair=pair, max_num_batched_tokens=max_num_batched_tokens)


def engine_of(method: str, kind: str, max_num_batched_tokens: int = 40) -> NativeEngine:
    return make_graph_engine(
        config_of(method, MODES[kind], max_num_batched_tokens), ENGINES[kind]()
    )


def name_no_rows(patch: pytest.MonkeyPatch) -> None:
    for module in (inputs, device_runner):
        patch.setattr(module, "needed_unless_all", lambda plan: None)


def others_engine(target: str, method: str, kind: str) -> NativeEngine:
    """With a cache of so few blocks that requests are preempted."""
    drafter = {"gemma4_mtp": f"{target}-assistant", "none": None}.get(method, f"{target}-{method}")
    config = graph_config(method, MODES[kind], pair=(target, drafter), block_size=8)
    config.engine.kv_cache.memory_gib = 0.3 * cache_gib(config)
    return make_graph_engine(config, ENGINES[kind]())


def count_rows(engine: NativeEngine, patch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """(rows, rows that are read, rows of the last layer) of every plan that runs eagerly."""
    runner, counts = engine.parts.runner, []
    target = runner.target
    assert isinstance(target, Decoder)
    place, last = runner.place, target.layers[-1]
    mlp, forward = last.mlp, runner.forward
    seen: list[int] = []

    class Counted:
        def __call__(self, x: torch.Tensor, *args: torch.Tensor) -> torch.Tensor:
            seen.append(x.shape[0])
            return mlp(x, *args)

        def __getattr__(self, name: str):  # type: ignore[no-untyped-def]
            def call(x: torch.Tensor, *args, **named):  # type: ignore[no-untyped-def]
                seen.append(x.shape[0])
                return getattr(mlp, name)(x, *args, **named)

            return call

    def counted_place(plan: StepPlan):  # type: ignore[no-untyped-def]
        read = np.where(plan.samples, plan.num_drafts + 1, 0).sum()
        counts.append((int(plan.num_rows.sum()), int(read), -1))
        return place(plan)

    def counted_forward(batch):  # type: ignore[no-untyped-def]
        seen.clear()
        step = forward(batch)
        if counts and counts[-1][2] < 0:
            counts[-1] = (*counts[-1][:2], max(seen, default=0))
        return step

    patch.setattr(runner, "place", counted_place)
    patch.setattr(runner, "forward", counted_forward)
    patch.setattr(last, "mlp", Counted())
    return counts


@pytest.mark.parametrize(
    ("method", "kind", "max_num_batched_tokens"),
    slow_unless(
        lambda method, kind, _: kind == "graphs" or (method == "none") == (kind == "cpu"),
        [
            ("none", "eager on a device", 40),
            ("none", "cpu", 200),
            ("gemma4_mtp", "cpu", 40),
            ("gemma4_mtp", "eager on a device", 200),
            ("gemma4_mtp", "graphs", 40),
        ],
    ),
)
def test_tokens_and_drafts_are_those_of_all_rows(
    method: str, kind: str, max_num_batched_tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunks of prompts mix with decodes, several prompts end in one step, and some steps read no
    row at all."""
    if kind != "cpu":
        attention_as_on_devices(monkeypatch)
    prompts_end_together = max_num_batched_tokens > 100
    with pytest.MonkeyPatch.context() as patch:
        name_no_rows(patch)
        engine = engine_of(method, kind, max_num_batched_tokens)
        counts = count_rows(engine, patch)
        wanted = run_requests(engine, zoo_requests(NUM_REQUESTS))
    assert all(rows == last for rows, _, last in counts)
    engine = engine_of(method, kind, max_num_batched_tokens)
    counts = count_rows(engine, monkeypatch)
    found = run_requests(engine, zoo_requests(NUM_REQUESTS))
    assert_same(found, wanted)
    assert all(read == last for _, read, last in counts)
    fewer = [(rows, read) for rows, read, _ in counts if read < rows]
    assert len(fewer) >= 2
    if prompts_end_together:
        assert fewer[0][1] > 1
    else:
        assert any(read == 0 for _, read in fewer), "no step without a request that samples"
    if method != "none":
        assert found.num_accepted > 20


@pytest.mark.parametrize(
    ("target", "method", "kind"),
    slow_unless(lambda target, *_: target not in ("tiny_mistral", "tiny_deepseek"), OTHERS),
)
def test_the_last_layer_writes_all_rows_and_runs_those_that_are_read(
    target: str, method: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chunked prompts, mixed steps, drafts and preempted requests."""
    if kind != "cpu":
        attention_as_on_devices(monkeypatch)
    with pytest.MonkeyPatch.context() as patch:
        name_no_rows(patch)
        wanted = run_requests(others_engine(target, method, kind), zoo_requests(5, longest=12))
    engine = others_engine(target, method, kind)
    counts = count_rows(engine, monkeypatch)
    found = run_requests(engine, zoo_requests(5, longest=12))
    assert_same(found, wanted)
    assert found.num_preempted
    assert all(read == last for _, read, last in counts)
    assert any(0 < read < rows for rows, read, _ in counts)


@pytest.mark.parametrize("kind", ENGINES)
def test_logits_are_those_of_all_rows(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if kind != "cpu":
        attention_as_on_devices(monkeypatch)
    engine = engine_of("gemma4_mtp", kind)
    tokens = [5 + n % 40 for n in range(90)]
    found = engine.next_token_logits(tokens)
    name_no_rows(monkeypatch)
    np.testing.assert_allclose(found, engine.next_token_logits(tokens), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("backend", [None, CalledAgain], ids=["cpu", "device"])
def test_a_large_prefill_reads_one_row_a_prompt(
    backend: type[CalledAgain] | None, tmp_path: Path
) -> None:
    """32 prompts of 512 tokens are one step of 16,384 rows; 32 are read."""
    config = run_config(
        write_folder(tmp_path, gemma4_config(max_position_embeddings=1024)),
        max_num_seqs=32,
        max_num_batched_tokens=16384,
        max_model_len=600,
        block_size=16,
    )
    config.cudagraph.capture_sizes = [1, 32]
    config.engine.prefix_caching = False  # the prompts are one, and would share its blocks
    engine = make_graph_engine(config, backend() if backend else None)
    for index in range(32):
        request = Request(index=index, id=str(index), sampling=SamplingParams())
        sequence = Sequence(request=request, token_ids=[3] * 512, num_prompt=512)
        engine.parts.scheduler.add(sequence)
    _, plan = engine._schedule()
    assert plan is not None
    runner = engine.parts.runner
    batch = runner.prepare(runner.place(plan))
    assert batch.input_ids.shape == (16384,)
    needed = batch.needed
    assert needed is not None
    assert needed.rows.tolist() == list(range(511, 16384, 512))
    assert needed.requests.tolist() == list(range(32))
    assert needed.query_start_loc.tolist() == list(range(33))
    assert [segment.num_requests for segment in needed.segments] == [32]


def test_drafters_that_read_every_row_get_every_row() -> None:
    """EAGLE-1 and MTP fill their own cache from the target's last states. Those that read
    auxiliary states, or the newest row alone, do not need them."""
    wanted = {
        ("tiny_mistral", "eagle"): True,
        ("tiny_deepseek", "mtp"): True,
        ("tiny_qwen3", "eagle3"): False,
        ("tiny_qwen3", "peagle"): False,
        ("tiny_qwen3", "dflash"): False,
        ("tiny_gemma4_e", "gemma4_mtp"): False,
    }
    found = {}
    for target_name, method in wanted:
        suffix = "assistant" if method == "gemma4_mtp" else method
        drafter = None if method == "mtp" else f"zoo:{target_name}-{suffix}"
        config = run_config(
            f"zoo:{target_name}", method=method, drafter=drafter, weights=Weights.checkpoint
        )
        speculator = build_speculator(config)
        speculator.load(load(config.target.checkpoint))
        found[target_name, method] = speculator.reads_all_hidden_states
    assert found == wanted
    assert not NoSpeculator(run_config("x")).reads_all_hidden_states


class ReadsEverything(NoSpeculator):
    @property
    def reads_all_hidden_states(self) -> bool:
        return True


def test_a_drafter_that_reads_every_row_is_not_given_fewer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = config_of("none", "none", 40)
    target = load(config.target.checkpoint, torch.float64)
    engine = make_engine(config, target, ReadsEverything(config))
    counts = count_rows(engine, monkeypatch)
    engine.next_token_logits(list(range(5, 60)))
    assert [last for _, _, last in counts] == [40, 15]
    assert isinstance(engine.parts.runner, Runner)
