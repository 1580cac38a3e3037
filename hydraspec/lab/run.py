"""A run from configuration to summary: load, warm up, measure, judge, save."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from functools import partial
from pathlib import Path

import torch

from hydraspec import factory
from hydraspec.config import to_dict
from hydraspec.config.schema import RunConfig, Verification
from hydraspec.engine.base import Engine, EngineInfo
from hydraspec.lab import (
    environment,
    plain_cache,
    positions,
    prediction,
    sampled,
    tracking,
    verdict,
)
from hydraspec.lab.folder import RunFolder
from hydraspec.lab.formats import check_costs, formats, quantization
from hydraspec.lab.lost import Beginning, FinishedRequests
from hydraspec.lab.recorder import Loaded, Recorder
from hydraspec.lab.rounds import Measurement
from hydraspec.lab.workload_size import limit_warnings, workload_size
from hydraspec.metrics.files import Json
from hydraspec.metrics.formats import KEY
from hydraspec.metrics.run_facts import RunFacts, WorkloadSize
from hydraspec.metrics.sinks import Side
from hydraspec.metrics.summary import Lossless
from hydraspec.types import NotFiniteError, WorkloadError
from hydraspec.workloads import generated
from hydraspec.workloads import reading as workloads
from hydraspec.workloads.arrivals import ArrivalProcess
from hydraspec.workloads.reading import Workload

log = logging.getLogger(__name__)


def run(
    config: RunConfig,
    *,
    run_dir: Path,
    overrides: Sequence[str],
    quiet: bool = False,
) -> Json:
    """Run a configuration and return its summary, which is also `run_dir`/summary.json.

    `config` is resolved, by lab.resolution. `overrides` are those typed, and are only recorded.
    With `quiet` nothing is printed. The status is "failed" if no request finished. An interrupt or
    an error while decoding is raised again after the finished requests are saved. With
    engine.vllm.node_rank above 0 this host only lends its devices, and nothing is saved.

    Raises:
        WorkloadError: before anything is decoded, with file and line.
        CheckpointError, ConfigurationError: from the engine.
        OSError: with the path, if the run folder cannot be written.
    """
    if config.engine.vllm.node_rank > 0:
        return factory.follow(config)
    folder = RunFolder(run_dir, to_dict(config), overrides)
    with (
        _load(config, folder, overrides) as loaded,
        closing(_finished_requests(loaded, folder)) as finished,
        closing(Recorder(folder, loaded, quiet=quiet)) as recorder,
    ):
        measurement = Measurement(
            loaded.engines,
            loaded.workload.requests,
            [*recorder.sinks, finished],
            concurrency=config.workload.concurrency,
            arrivals=_arrivals(config),
        )
        try:
            measurement.warm_up()
            info = measurement.method.engine.info
            if info.costs is not None:
                folder.write_costs(info.costs.as_json() | {KEY: quantization(info)})
            measurement.run()
            lossless = _look_at_outputs(loaded, measurement, recorder)
        except KeyboardInterrupt:
            recorder.save(measurement, "interrupted", _judge_if_possible(loaded, measurement))
            raise
        except Exception as error:
            try:
                recorder.save_early(error, measurement)
            except OSError as other:  # the error itself matters more
                error.add_note(f"and what had finished could not be saved: {other}")
            raise
        if lossless["not_finite_in"] is not None:
            recorder.save(measurement, "failed", lossless)
            raise _not_finite(lossless["not_finite_in"], lossless, measurement)
        is_any_finished = any(c.finished for c in measurement.method.meter.completed)
        return recorder.save(measurement, "ok" if is_any_finished else "failed", lossless)


def _look_at_outputs(loaded: Loaded, measurement: Measurement, recorder: Recorder) -> Lossless:
    """Profile steps, record drafts from every place, and check samples; returns the verdict."""
    config, warnings = loaded.config, loaded.workload.warnings
    measurement.profile()
    warnings += positions.record(config, measurement, recorder.add_scores, loaded.decode)
    distribution, found = sampled.check(config, measurement)
    warnings += found
    agreement, found = plain_cache.compare(config, measurement)
    warnings += found
    verdict_now = _judge(loaded, measurement)
    return {**verdict_now, "distribution": distribution, "kv_cache": agreement}


def _arrivals(config: RunConfig) -> ArrivalProcess:
    load = config.workload
    return ArrivalProcess(rate=load.request_rate, burstiness=load.burstiness, seed=config.seed)


# ------------------------------------------------------------------ load


@contextmanager
def _load(config: RunConfig, folder: RunFolder, typed: Sequence[str]) -> Iterator[Loaded]:
    """Context that reads the workload, loads the engine and tokenises; closes engines and tracker
    at its end."""
    workload, expected = workloads.read(config), prediction.read(config)
    with ExitStack() as open_parts:
        replaces = folder.holds_older_run
        # The tracker starts while the engine loads, but not among an older run's files.
        tracker = None if replaces else tracking.start(config, folder.path, open_parts, typed)
        started = time.perf_counter()
        engine = factory.build_engine(config)
        open_parts.callback(engine.close)
        logged = factory.log_notes(engine)
        check_costs(config, engine.info)
        expected.check_formats(formats(engine.info))
        workload = _tokenised(config, engine, workload)
        load_s = time.perf_counter() - started
        folder.replace_older_run()
        described = environment.describe(engine.info)
        folder.write_environment(described)
        if replaces:
            tracker = tracking.start(config, folder.path, open_parts, typed)
        loaded_at = time.perf_counter()
        engines = {Side.method: engine}
        if config.baseline and config.method.name != "none":
            engines[Side.baseline] = engine.baseline()
            open_parts.callback(engines[Side.baseline].close)
            logged += factory.log_notes(engine, engines[Side.baseline])
        if tracker is not None:
            spec, memory = engine.info.draft_spec, engine.info.memory_bytes
            tracker.add_config(environment=described, draft_spec=spec, memory_bytes=memory)
            tracker.wait_until_ready()
        num_arriving = sum(request.after is None for request in workload.requests)
        arrivals = _arrivals(config).warnings(num_arriving, len(engines))
        size = workload_size(config, workload)
        for warning in (*arrivals, *expected.warnings, *limit_warnings(config, size)):
            log.warning(warning)
            workload.warnings.append(warning)
            logged.append(warning)
        yield Loaded(
            config=config,
            typed=typed,
            engines=engines,
            workload=workload,
            logged=logged,
            expected=expected,
            tracker=tracker,
            decode=positions.decoder(config),
            facts=partial(_facts, load_s, loaded_at, size),
        )


def _facts(load_s: float, loaded_at: float, size: WorkloadSize, info: EngineInfo) -> RunFacts:
    """The run's facts now; `loaded_at`: time.perf_counter() once the engine was loaded."""
    return {
        "num_threads": torch.get_num_threads(),
        "workload_size": size,
        "max_memory_bytes": info.max_memory_bytes or info.memory_bytes,
        "memory_bytes": {**info.memory_bytes, "peak_rss": environment.peak_rss_bytes()},
        "load_s": load_s,
        "run_s": time.perf_counter() - loaded_at,
    }


def _tokenised(config: RunConfig, engine: Engine, workload: Workload | None) -> Workload:
    vocab_size = engine.info.vocab_size
    if workload is None:
        workload = generated.random_requests(config, vocab_size)
    workloads.check_configured_ids(config, vocab_size)
    workload.check_vocabulary(vocab_size)
    try:
        engine.tokenize(workload.requests)
    except WorkloadError as error:
        raise workload.with_place(error) from error
    return workload


def _finished_requests(loaded: Loaded, folder: RunFolder) -> FinishedRequests:
    """The sink that writes requests as they finish, for a run whose process may be lost."""
    infos = {side: engine.info for side, engine in loaded.engines.items()}
    facts = loaded.facts(infos[Side.method])
    beginning = Beginning(infos, facts, loaded.workload.warnings)
    return FinishedRequests(folder, loaded.workload.requests, beginning)


# ------------------------------------------------------------------ verdict


def _judge(loaded: Loaded, measurement: Measurement) -> Lossless:
    method, baseline = measurement.method, measurement.baseline
    requests = loaded.workload.requests
    if baseline is None:
        plain = loaded.config.method.name == "none"
        reason = "method=none is the baseline" if plain else "baseline=false"
        return {
            **verdict.not_checked(reason, requests, method.completions),
            "not_finite_in": verdict.look_at_logits(requests, method.completions, method.engine),
        }
    return verdict.judge(
        requests,
        method.completions,
        baseline.completions,
        method.engine,
        synthetic=loaded.config.method.verification is Verification.synthetic,
    )


def _judge_if_possible(loaded: Loaded, measurement: Measurement) -> Lossless:
    """The verdict after an interrupt; "not_checked" at a second one, or if the engine fails."""
    try:
        return _judge(loaded, measurement)
    except (KeyboardInterrupt, Exception):
        reason = "interrupted before the outputs were compared"
        return verdict.not_checked(reason, loaded.workload.requests, measurement.method.completions)


def _not_finite(request_id: str, lossless: Lossless, measurement: Measurement) -> NotFiniteError:
    """The error of a run whose non-finite logits the engine did not detect, with the position of
    the token whose logits were examined."""
    method = measurement.method
    if (found := lossless["first_beyond_margin"]) and found["request"] == request_id:
        position = found["position"]
    else:
        index = next(r.index for r in measurement.requests if r.id == request_id)
        position = len(method.completions[index].output_token_ids) - 1
    return NotFiniteError(request_id, position, method.engine.info.dtype)
