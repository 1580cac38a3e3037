"""Records of runs and sweeps in W&B."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

from hydraspec.config.names import run_name
from hydraspec.config.schema import RunConfig
from hydraspec.config.used import used
from hydraspec.metrics.tracker import TrackerOptions, WandbSink
from hydraspec.study.answers import answers, job_table
from hydraspec.study.blocks import Study
from hydraspec.study.groups import Runs

log = logging.getLogger(__name__)

UNNAMED = "wandb"  # tracker.name where the run has no name of its own


def start(
    config: RunConfig, run_dir: Path, open_parts: ExitStack, typed: Sequence[str]
) -> WandbSink | None:
    """Start to record a run; returns the sink, None without a tracker. `open_parts` closes it.

    Args:
        typed: the run's overrides, of which its name is made unless tracker.name gives one.
    """
    if not config.tracker.records:
        return None
    method = config.method
    name = config.tracker.name
    if name == UNNAMED:
        own = f"{config.target.name}-{method.name}-{method.num_speculative_tokens}"
        name = run_name(config, typed, own=own)
    sink = WandbSink(_options(config, name), run_dir, used(config))
    return open_parts.enter_context(closing(sink))


def _options(config: RunConfig, name: str) -> TrackerOptions:
    tracker = config.tracker
    drafts = config.method.num_speculative_tokens
    k = f"K={getattr(drafts, 'value', drafts)}"
    tags = (config.target.name, config.method.name, k, config.engine.name, config.workload.name)
    return TrackerOptions(
        project=tracker.project,
        entity=tracker.entity,
        group=tracker.group,
        mode=tracker.mode.value,
        name=name,
        job_type=tracker.job_type,
        tags=tuple(dict.fromkeys([*tracker.tags, *(tag[:64] for tag in tags)])),
        notes=tracker.notes,
    )


def record_sweep(config: RunConfig, made: Study, runs: Runs, folder: Path, *, group: str) -> None:
    """Record the summary run of a sweep in W&B, with local files in `folder`, which exists.

    Args:
        config: the configuration of a run of the sweep that has a tracker.
        group: the W&B group of the sweep's runs, if tracker.group is null.
    """
    group = config.tracker.group or group
    options = replace(
        _options(config, f"summary of {group}"),
        group=group,
        job_type="summary",
        tags=tuple(config.tracker.tags),
        notes=config.tracker.notes or "\n".join(verdict.text for verdict in made.verdicts),
    )
    sink = WandbSink(options, folder, {"question": made.question, "num_jobs": len(runs.jobs)})
    with closing(sink):
        sink.wait_until_ready()
        for warning in sink.on_sweep(job_table(runs), answers(runs)):
            log.warning(warning)
