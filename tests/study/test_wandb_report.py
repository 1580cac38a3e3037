"""The W&B Report: its spec without a server, and what `--publish` sends to one."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from studied_runs import configure, edit

from hydraspec.report import main
from hydraspec.study import groups, wandb_report
from hydraspec.study.contents import study

wr = pytest.importorskip("wandb_workspaces.reports.v2")
interface = wr.interface


def record(run: Path, run_id: str) -> None:
    """A W&B run in a run's folder, as wandb writes it offline."""
    folder = run / "wandb" / f"offline-run-20261122_000000-{run_id}"
    folder.mkdir(parents=True)
    (folder / f"run-{run_id}.wandb").write_bytes(b"")
    (run / "wandb" / "latest-run").symlink_to(folder)
    configure(run, tracker__project="lab", tracker__entity=None)


@pytest.fixture
def recorded(studied: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Jobs 0 and 1 were recorded; no server can be reached."""
    for job in ("0", "1"):
        record(studied / job, f"id{job}")

    def unreachable(*arguments: object) -> None:
        raise AssertionError("a spec is made without a server")

    monkeypatch.setattr(interface, "_get_api", unreachable)
    monkeypatch.setattr(interface, "execute_graphql", unreachable)
    return studied


def test_the_spec_is_that_of_the_page_and_passes_their_models(recorded: Path) -> None:
    """Read back by wandb-workspaces' own models: every block is one that it knows."""
    edit(recorded / "0", warnings=["shows: python -m hydraspec.doctor target=tiny_gemma4"])
    assert main([str(recorded)]) == 0
    made = json.loads((recorded / "study.json").read_text(encoding="utf-8"))
    assert "python -m hydraspec.doctor target=tiny_gemma4" in json.dumps(made)
    model = wr.internal.ReportViewspec.model_validate(made)
    report = wr.Report._from_model(model)
    assert (report.project, report.title) == (
        "lab",
        "Which drafter for tiny_fake on workload jsonl?",
    )
    kinds = [type(block).__name__ for block in report.blocks]
    assert not {kind for kind in kinds if kind.startswith("Unknown")}
    titles = [block.text for block in report.blocks if isinstance(block, wr.H2)]
    runs = groups.read([recorded])
    on_page = [block.title for section in study(runs).sections for block in section.blocks]
    assert titles == [*on_page, "Over steps"]
    assert "Warnings" in titles
    grids = [block for block in report.blocks if isinstance(block, wr.PanelGrid)]
    panels = [panel for grid in grids for panel in grid.panels]
    assert {type(panel) for panel in panels} == {wr.ScatterPlot, wr.BarPlot, wr.LinePlot}
    for grid in grids:
        assert all(run_id in str(grid.runsets[0].filters) for run_id in ("id0", "id1"))
    again = report._to_model().spec.model_dump(by_alias=True, exclude_none=True, mode="json")
    assert [block["type"] for block in again["blocks"]] == [
        block["type"] for block in made["spec"]["blocks"]
    ]


def test_panels_read_what_runs_log(recorded: Path) -> None:
    """Catches a key that is renamed in the tracker alone."""
    from hydraspec.metrics.run_files import read_summary
    from hydraspec.metrics.tracker import SORTED, final_figures

    known: set[str] = set()
    for job in ("0", "1"):
        known |= set(final_figures(read_summary(recorded / job)))
    known.add("speedup/mean")  # null in a fake engine's run, whose steps take no time
    made = study(groups.read([recorded]))
    panels = [panel for s in made.sections for block in s.blocks for panel in block.panels]
    assert {panel.kind for panel in panels} == {"scatter", "bar"}
    assert {key for panel in panels for key in panel.metrics} - known == set()
    assert set(wandb_report.COLUMNS) - (known & set(SORTED)) == set()
    runs = groups.read([recorded])
    spec = json.dumps(wandb_report.spec(made, wandb_report.place_of(runs)))
    assert "acceptance_rate_per_position/0" in spec
    assert "acceptance_length_by_category" not in spec, "these are lines of the table of figures"


def test_runs_that_were_not_recorded_have_tables_only(studied: Path) -> None:
    runs = groups.read([studied])
    place = wandb_report.place_of(runs)
    assert place.run_ids == []
    report = wr.Report._from_model(
        wr.internal.ReportViewspec.model_validate(wandb_report.spec(study(runs), place))
    )
    kinds = {type(block) for block in report.blocks}
    assert wr.MarkdownBlock in kinds
    assert wr.PanelGrid not in kinds


def test_text_is_escaped_in_tables(studied: Path) -> None:
    name = "<b>|`x`"
    configure(studied / "1", engine__device=name)
    runs = groups.read([studied])
    text = json.dumps(wandb_report.spec(study(runs), wandb_report.place_of(runs)))
    assert name not in text
    assert "\\\\<b>\\\\|\\\\`x\\\\`" in text


class FakeServer:
    """As much of W&B's server as saving a report asks for."""

    def __init__(self, failing: str = "") -> None:
        self.failing = failing
        self.created: list[tuple[str, str]] = []
        self.sent: list[dict[str, Any]] = []
        self.default_entity = "me"
        self.client = SimpleNamespace(app_url="https://wandb.example")

    def projects(self, entity: str) -> list[Any]:
        return [SimpleNamespace(name="other")]

    def create_project(self, name: str, entity: str) -> None:
        self.created.append((name, entity))

    def execute(self, api: object, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        if self.failing:
            raise RuntimeError(self.failing)
        self.sent.append(variables)
        view = {
            "id": variables["id"] or "Vmlldzo0Mg==",
            "name": variables["name"],
            "displayName": variables["displayName"],
            "spec": variables["spec"],
            "project": {"name": variables["projectName"], "entityName": variables["entityName"]},
        }
        return {"upsertView": {"view": view}}


@pytest.fixture
def server(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    import wandb

    made = FakeServer()
    monkeypatch.setattr(interface, "_get_api", lambda: made)
    monkeypatch.setattr(interface, "execute_graphql", made.execute)
    monkeypatch.setattr(interface, "get_app_url", lambda api: "https://wandb.example")
    monkeypatch.setattr(wandb, "Api", lambda: made)
    monkeypatch.setattr(wandb, "login", lambda prompt=True: True)
    return made


def test_publish(recorded: Path, server: FakeServer, capsys: pytest.CaptureFixture[str]) -> None:
    """A new report the first time, the same one the second."""
    assert main([str(recorded), "--publish"]) == 0
    assert "Published: https://wandb.example/me/lab/reports/" in capsys.readouterr().out
    (sent,) = server.sent
    assert (sent["entityName"], sent["projectName"], sent["id"]) == ("me", "lab", None)
    assert server.created == [("lab", "me")]
    written = json.loads((recorded / "study.json").read_text(encoding="utf-8"))
    wr.internal.Spec.model_validate_json(sent["spec"])
    assert written["id"] == "Vmlldzo0Mg=="
    assert main([str(recorded), "--publish", "--entity", "team", "--project", "mine"]) == 0
    again = server.sent[-1]
    assert (again["entityName"], again["projectName"]) == ("team", "mine")
    assert again["id"] == "Vmlldzo0Mg=="


def test_what_the_server_refuses_is_one_message(
    recorded: Path, server: FakeServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.failing = "permission denied\nsecond line"
    assert main([str(recorded), "--publish"]) == 1
    (said,) = capsys.readouterr().err.splitlines()
    assert "W&B did not take the report: RuntimeError: permission denied" in said
    assert "study.json" in said


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ("no key", "no API key is configured"),
        ("no project", "the runs were not recorded in W&B"),
        ("no package", "wandb-workspaces is not installed"),
    ],
)
def test_publishing_is_refused(
    change: str,
    says: str,
    recorded: Path,
    server: FakeServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import wandb

    if change == "no key":
        monkeypatch.setattr(wandb, "login", lambda prompt=True: False)
    elif change == "no project":
        for job in ("0", "1"):
            configure(recorded / job, tracker__project=None)
    else:
        monkeypatch.setattr(wandb_report, "is_installed", lambda: False)
    assert main([str(recorded), "--publish"]) == 2
    said = capsys.readouterr().err
    assert says in said
    assert [line.split(":")[0] for line in said.splitlines()][1:] == ["  allowed", "  to do"]
    assert server.sent == []


def test_without_the_package_the_page_is_written(
    recorded: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(wandb_report, "is_installed", lambda: False)
    assert main([str(recorded)]) == 0
    assert (recorded / "study.html").is_file()
    assert not (recorded / "study.json").exists()
    assert 'pip install "hydraspec[reports]"' in capsys.readouterr().err
