"""What ends a run or a sweep beside its files: its record in W&B, and its report."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

from hydraspec.config.benches import is_bench
from hydraspec.config.schema import RunConfig, TrackerMode
from hydraspec.config.used import used
from hydraspec.errors import UserError
from hydraspec.metrics.run_files import STUDY_SPEC
from hydraspec.metrics.tracker import TrackerOptions, WandbSink
from hydraspec.report.study import groups, page, wandb_report
from hydraspec.report.study.answers import answers
from hydraspec.report.study.blocks import Study
from hydraspec.report.study.contents import study
from hydraspec.report.study.groups import Runs
from hydraspec.report.study.rows import job_table

log = logging.getLogger(__name__)

UNNAMED = "wandb"  # tracker.name where the run has no name of its own


def start(config: RunConfig, run_dir: Path, open_parts: ExitStack) -> WandbSink | None:
    """Start to record a run, None without a tracker; `open_parts` closes it."""
    if not config.tracker.records:
        return None
    method = config.method
    own = f"{config.target.name}-{method.name}-{method.num_speculative_tokens}"
    name = own if config.tracker.name == UNNAMED else config.tracker.name
    sink = WandbSink(_options(config, name), run_dir, used(config))
    return open_parts.enter_context(closing(sink))


def _options(config: RunConfig, name: str) -> TrackerOptions:
    tracker = config.tracker
    tags = (config.target.name, config.method.name, config.engine.name)
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


def close_run(config: RunConfig, folder: Path, *, quiet: bool = False) -> None:
    """Make the report of a single run. What fails is a warning."""
    if runs := _read(folder):
        _report(config, study(runs), runs, folder, quiet=quiet)


def close_sweep(configs: Sequence[RunConfig], folder: Path, *, group: str) -> None:
    """Record a sweep's summary run, and make its report, if these are asked for. What fails is a
    warning.

    Args:
        group: of its runs in W&B, where none was chosen.
    """
    tracked = next((config for config in configs if config.tracker.records), None)
    reports = any(config.tracker.report for config in configs)
    if is_bench(configs[0]) or not (tracked or reports) or not (runs := _read(folder)):
        return
    made = study(runs)
    if tracked is not None:
        _record_sweep(tracked, made, runs, folder, group)
    if reports:
        _report(tracked or configs[0], made, runs, folder)


def _record_sweep(config: RunConfig, made: Study, runs: Runs, folder: Path, group: str) -> None:
    group = config.tracker.group or group
    options = replace(
        _options(config, f"summary of {group}"),
        group=group,
        job_type="summary",
        tags=tuple(config.tracker.tags),
        notes=config.tracker.notes or "\n".join(verdict.sentence for verdict in made.verdicts),
    )
    sink = WandbSink(options, folder, {"question": made.question, "num_jobs": len(runs.jobs)})
    with closing(sink):
        sink.wait_until_ready()
        for warning in sink.on_sweep(job_table(runs), answers(runs)):
            log.warning(warning)


def _read(folder: Path) -> Runs | None:
    try:
        return groups.read([folder])
    except UserError as error:
        log.warning("no report: %s", str(error).splitlines()[0])
    return None


def _report(
    config: RunConfig, made: Study, runs: Runs, folder: Path, *, quiet: bool = False
) -> None:
    """Write the report; with tracker.mode=online W&B gets it too."""
    try:
        paths = page.write(made, runs, folder)
        if not quiet:
            page.tell(made, paths)
        if config.tracker.records and config.tracker.mode is TrackerMode.online:
            wandb_report.check_installed()
            log.info("published: %s", wandb_report.publish(folder / STUDY_SPEC))
    except (OSError, UserError) as error:
        log.warning("the report: %s", str(error).splitlines()[0])
