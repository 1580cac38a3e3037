"""`python -m hydraspec.predict`: loads, measures, predicts and saves.

For each K an engine is loaded, measured beside its baseline, and closed again.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from hydraspec import factory
from hydraspec.analysis.predict import words
from hydraspec.analysis.predict.measure import Costs
from hydraspec.analysis.predict.prediction import Prediction, Wanted
from hydraspec.config import to_dict
from hydraspec.config.checks import check_method
from hydraspec.config.messages import refusal
from hydraspec.config.own_drafter import check_own_drafter
from hydraspec.config.schema import RunConfig
from hydraspec.engine.base import Engine
from hydraspec.lab import environment
from hydraspec.lab.folder import RunFolder
from hydraspec.metrics.files import Json, pretty_json, write_whole
from hydraspec.metrics.run_files import PREDICTION, PREDICTION_REPORT
from hydraspec.signals import interrupts_stay_interrupts
from hydraspec.workloads import reading as workloads


@interrupts_stay_interrupts()
def predict(
    config: RunConfig, wanted: Wanted, *, run_dir: Path, overrides: Sequence[str], quiet: bool
) -> Json:
    """Predict the speedups of a resolved configuration. Returns the content of predict.json, which
    is saved in `run_dir`.

    Raises:
        ConfigurationError: no drafter, or an engine or layout that is not predicted.
        CheckpointError, WorkloadError: as a run raises them.
    """
    check(config, wanted)
    folder = RunFolder(run_dir, to_dict(config), overrides)
    workload, say = workloads.read(config), words.progress(quiet=quiet)
    prediction: Prediction | None = None
    for num_drafts in sorted(wanted.drafts, reverse=True):
        with _engines(config, num_drafts) as (engine, plain):
            if prediction is None:
                check_contexts(wanted, engine)
                folder.replace_older_run()
                folder.write_environment(environment.describe(engine.info))
                prediction = Prediction.begin(config, wanted, engine, workload, say)
            prediction.add(engine, plain)
    assert prediction is not None, "at least one K is wanted"
    result = prediction.as_json()
    write_whole(folder.path / PREDICTION, pretty_json(result))
    write_whole(folder.path / PREDICTION_REPORT, words.page_of(result))
    words.show(result, folder.path, quiet=quiet)
    return result


def check(config: RunConfig, wanted: Wanted) -> None:
    """Refuse a run that cannot be predicted, before anything is loaded.

    Raises:
        ConfigurationError: a key, which is named, has a value that is not predicted.
    """
    check_own_drafter(
        config,
        verb="predicted",
        none=("is what the others are compared with", "give method=…"),
        engine="step costs are those of our own engine",
        ranks="leave parallelism out",
    )
    if config.workload.request_rate is not None:
        raise refusal(
            "workload.request_rate",
            config.workload.request_rate,
            "is not predicted: requests follow each other, so many at once",
            allowed="null",
            remedy="leave it out, and give --concurrency",
        )
    for num_drafts in wanted.drafts:
        check_method(_with_drafts(config, num_drafts))
    if (most := max(wanted.concurrencies)) > config.engine.max_num_seqs:
        raise refusal(
            "--concurrency",
            most,
            "is more than engine.max_num_seqs",
            allowed=f"1 to {config.engine.max_num_seqs}",
            remedy=f"add engine.max_num_seqs={most}",
        )


def check_contexts(wanted: Wanted, engine: Engine) -> None:
    """Refuse a context that leaves no room for the steps that are timed.

    Raises:
        ConfigurationError: not even one request of the longest context fits.
    """
    costs, longest = Costs(engine), max(wanted.contexts, default=1)
    if not costs.fits(longest, 1):
        raise refusal(
            "--contexts",
            longest,
            "leaves no room for the steps that are timed",
            allowed=f"up to {engine.info.max_model_len} (target.max_model_len) less their "
            f"{costs.num_tokens} tokens, and what the KV cache holds",
            remedy="give shorter ones, or raise target.max_model_len or engine.kv_cache.memory_gib",
        )


def _with_drafts(config: RunConfig, num_drafts: int) -> RunConfig:
    method = replace(
        config.method, num_speculative_tokens=num_drafts, max_speculative_tokens=None, costs=None
    )
    return replace(config, method=method)


@contextmanager
def _engines(config: RunConfig, num_drafts: int) -> Iterator[tuple[Engine, Engine]]:
    """The engine with K drafts, and the same target without a drafter."""
    engine = factory.build_engine(_with_drafts(config, num_drafts))
    factory.log_notes(engine)
    try:
        gc.collect()
        gc.freeze()
        plain = engine.baseline()
        yield engine, plain
        factory.log_notes(engine, plain)  # also of graphs that were captured meanwhile
    finally:
        gc.unfreeze()
        engine.close()
