"""The W&B Report of a study: the same blocks, with panels over the W&B runs in place of charts.

The report's specification is made without a server; `publish` saves it to W&B. wandb-workspaces is
an optional package: pip install "hydraspec[reports]".
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hydraspec.errors import ConfigurationError, UserError, printable
from hydraspec.metrics.files import Json, pretty_json, write_whole
from hydraspec.metrics.run_files import STUDY_SPEC, TRACKER
from hydraspec.metrics.tracker import SORTED, described, require_key
from hydraspec.study.blocks import Block, Panel, Section, Study
from hydraspec.study.groups import Runs
from hydraspec.study.words import as_markdown

MAX_TITLE = 128
COLUMNS = (
    *("speedup/mean", "acceptance_length/mean", "tokens_per_second_per_user"),
    *("output_tokens_per_second", "lossless/verdict"),
)
STEP = "steps/method/step"
OVER_STEPS = (  # panels over the runs' curves, which W&B alone has
    Panel(kind="line", title="Acceptance length", metrics=("steps/method/acceptance_length",)),
    Panel(kind="line", title="Milliseconds per step", metrics=("steps/method/step_ms",)),
    Panel(kind="line", title="KV cache in use", metrics=("steps/method/kv_usage",)),
)


class PublishError(UserError):
    """W&B could not be reached, or refused the report."""

    exit_code = 1


@dataclass(slots=True, frozen=True, kw_only=True)
class Place:
    """Project and entity of runs in W&B; `recorded` has the ids of W&B runs by run folder."""

    project: str
    entity: str
    recorded: Mapping[Path, Sequence[str]] = field(default_factory=dict)

    @property
    def run_ids(self) -> list[str]:
        """The ids of all recorded runs; empty where none was recorded."""
        return [name for ids in self.recorded.values() for name in ids]

    def of(self, section: Section) -> Place:
        """The same place with only the runs of a section; all runs for a section about all."""
        if not section.folders:
            return self
        kept = {path: ids for path, ids in self.recorded.items() if path in section.folders}
        return replace(self, recorded=kept)


INSTALL = 'install the package with: pip install "hydraspec[reports]"'


def is_installed() -> bool:
    """Returns whether wandb-workspaces can be imported."""
    from importlib.util import find_spec

    return find_spec("wandb_workspaces") is not None


def check_installed() -> None:
    """Check that wandb-workspaces is installed.

    Raises:
        ConfigurationError: wandb-workspaces is not installed.
    """
    if not is_installed():
        raise _refused("wandb-workspaces is not installed", INSTALL)


def _refused(problem: str, remedy: str) -> ConfigurationError:
    allowed = "with wandb-workspaces installed, on a machine that has logged in to W&B"
    return ConfigurationError(f"--publish: {problem}\n  allowed: {allowed}\n  to do: {remedy}")


def place_of(runs: Runs) -> Place:
    """The place of the first recorded run, with all runs that were recorded there."""
    recorded = [run for run in runs.runs if _run_ids(run.folder)]
    first = (recorded or runs.runs)[0]
    place = _place(first.settings)
    here = [run.folder for run in recorded if _place(run.settings) == place]
    ids = {folder: _run_ids(folder) for folder in here}
    return Place(project=place[0], entity=place[1], recorded=ids)


def _place(settings: Any) -> tuple[str, str]:
    return str(settings.get("tracker.project") or ""), str(settings.get("tracker.entity") or "")


def _run_ids(folder: Path) -> list[str]:
    """The ids of a folder's W&B runs, from the names of wandb's files: run-<id>.wandb."""
    files = (folder / TRACKER).glob("*run-*/run-*.wandb")
    own = (file for file in files if not file.parent.is_symlink())  # latest-run is a link
    return sorted({file.stem.removeprefix("run-") for file in own})


# ---------------------------------------------------------------- the spec


def spec(study: Study, place: Place) -> Json:
    """The report as W&B's view specification, without asking a server."""
    from wandb_workspaces.reports import v2 as wr

    report = wr.Report(
        project=place.project,
        entity=place.entity,
        title=printable(study.question)[:MAX_TITLE],
        description=printable(study.facts),
        blocks=list(_blocks(study, place, wr)),
        width="fluid",
    )
    return json.loads(report._to_model().model_dump_json(by_alias=True, exclude_none=True))


def _blocks(study: Study, place: Place, wr: Any) -> Iterator[Any]:
    for verdict in study.verdicts:
        yield wr.CalloutBlock(printable(verdict.text))
    if study.notes:
        yield wr.UnorderedList([printable(note) for note in study.notes])
    for section in study.sections:
        if section.title:
            yield wr.H1(printable(section.title))
        for block in section.blocks:
            yield from _block(block, place.of(section), wr)
    if place.run_ids:
        yield wr.H2("Over steps")
        yield _grid(OVER_STEPS, place, wr)


def _block(block: Block, place: Place, wr: Any) -> Iterator[Any]:
    yield wr.H2(printable(block.title))
    if block.note:
        yield wr.P(printable(block.note))
    if block.sentences:
        yield wr.UnorderedList([printable(sentence) for sentence in block.sentences])
    panels = [
        replace(p, metrics=[name for name in p.metrics if name in SORTED]) for p in block.panels
    ]
    if place.run_ids and (panels := [panel for panel in panels if panel.metrics]):
        yield _grid(panels, place, wr)
    if block.table:
        yield wr.MarkdownBlock(as_markdown(block.table).strip())


def _grid(panels: Sequence[Panel], place: Place, wr: Any) -> Any:
    """Grid of panels over the report's runs, with a list of the runs and their main figures."""
    from wandb_workspaces import expr

    runs = wr.Runset(
        name="runs",
        filters=expr.And(expr.Metric("ID").isin(list(place.run_ids))),
        pinned_columns=[f"summary:{name}" for name in COLUMNS],
    )
    return wr.PanelGrid(runsets=[runs], panels=[_panel(panel, wr) for panel in panels])


def _panel(panel: Panel, wr: Any) -> Any:
    layout = wr.Layout(w=12, h=8)
    if panel.kind == "line":
        x = wr.Metric(STEP)
        return wr.LinePlot(title=panel.title, x=x, y=list(panel.metrics), layout=layout)
    metrics = [wr.SummaryMetric(name) for name in panel.metrics]
    if panel.kind == "scatter":
        x, y = metrics
        return wr.ScatterPlot(title=panel.title, x=x, y=y, layout=layout)
    return wr.BarPlot(title=panel.title, metrics=metrics, layout=layout)


# ---------------------------------------------------------------- file and server


def write(study: Study, runs: Runs | None, folder: Path) -> Path:
    """Write the report's specification into `folder`, with the id under which it was published
    before, if any. Returns the path of the file.

    Raises:
        OSError: the file cannot be written; the error has its path.
    """
    path = folder / STUDY_SPEC
    place = place_of(runs) if runs else Place(project="", entity="")
    made = spec(study, place) | {"id": _published_id(path)}
    write_whole(path, pretty_json(made))
    return path


def publish(path: Path, entity: str | None = None, project: str | None = None) -> str:
    """Save the report of a specification file to W&B, over the report saved from this file before.

    Args:
        entity, project: place of the report; None: that of the runs, else your default entity.

    Returns:
        The report's address.

    Raises:
        ConfigurationError: no API key is configured, or no project is known.
        PublishError: W&B could not be reached or refused the report; the message has the answer.
    """
    import wandb
    from wandb_workspaces.reports import v2 as wr
    from wandb_workspaces.reports.v2 import internal

    made = json.loads(path.read_text(encoding="utf-8"))
    try:
        require_key(wandb)
    except RuntimeError as error:
        raise _refused(str(error), "run wandb login, then this command again") from None
    where = made["project"]
    where["name"] = project or where["name"]
    if not where["name"]:
        raise _refused("the runs were not recorded in W&B", "add --project=<name>")
    try:
        where["entityName"] = entity or where["entityName"] or wandb.Api().default_entity
        report = wr.Report._from_model(internal.ReportViewspec.model_validate(made))
        report.save()
    except Exception as error:  # errors of wandb, of requests, and of parsing W&B's answer
        what = f"W&B did not take the report: {described(error)}; {path} holds it"
        raise PublishError(what) from error
    write_whole(path, pretty_json(made | {"id": report.id}))
    return str(report.url)


def _published_id(path: Path) -> str:
    try:
        return str(json.loads(path.read_text(encoding="utf-8"))["id"])
    except (OSError, ValueError, KeyError, TypeError):
        return ""
