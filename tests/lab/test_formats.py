"""Costs and predictions say the number formats that they were measured in, and serve no others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fake_engine import FakeEngine, make_info

from hydraspec.analysis.predict import words
from hydraspec.cli.compose import plan
from hydraspec.errors import ConfigurationError
from hydraspec.lab import formats, prediction
from hydraspec.metrics.formats import Formats, columns, formats_of, shared_words
from hydraspec.metrics.formats import words as in_words

FP8 = {"q_proj": "fp8 per channel, inputs per token"}
INT4 = {"q_proj": "int4 group 16"}
BOTH = r"formats \(target fp8 per channel, inputs per token, drafter float\) than those of this run"


def config(*overrides: str) -> Any:
    return plan(overrides).jobs[0].config


def costs_of(folder: Path, **quantization: Any) -> Any:
    """A configuration whose costs are of these formats; of none if nothing is said."""
    content: dict[str, Any] = {"schema_version": 1}
    if quantization:
        content["quantization"] = quantization
    (folder / "costs.json").write_text(json.dumps(content), encoding="utf-8")
    found = config("method.num_speculative_tokens=auto", "method.max_speculative_tokens=3")
    found.method.costs = str(folder / "costs.json")
    return found


def test_costs_of_another_format_are_refused_naming_both(tmp_path: Path) -> None:
    given = costs_of(tmp_path, target=FP8, drafter=None)
    formats.check_costs(given, make_info(quantization=FP8))
    with pytest.raises(ConfigurationError, match=BOTH) as caught:
        formats.check_costs(given, make_info(quantization=INT4))
    assert "method.costs=" in str(caught.value)
    assert "(target int4 group 16, drafter float)" in str(caught.value)
    with pytest.raises(ConfigurationError, match="drafter int4 group 16"):
        formats.check_costs(given, make_info(quantization=FP8, draft_spec={"quantization": INT4}))


def test_costs_that_do_not_say_theirs_are_used(tmp_path: Path) -> None:
    """Files of earlier versions, and a file that the engine itself will refuse."""
    formats.check_costs(costs_of(tmp_path), make_info(quantization=FP8))
    missing = costs_of(tmp_path)
    missing.method.costs = "nowhere.json"
    formats.check_costs(missing, make_info())
    formats.check_costs(config(), make_info(quantization=FP8))


def test_a_prediction_of_another_format_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "predict.json"
    row = {"num_speculative_tokens": 3, "concurrency": 4, "speedup": 1.7, "acceptance_length": 2.5}
    row["break_even_acceptance_length"] = 3.1
    content = {"target": "tiny_gemma4", "method": "gemma4_mtp", "predictions": [row]}
    file.write_text(json.dumps(content), encoding="utf-8")
    found = prediction.read(config(f"metrics.prediction={tmp_path}"))
    found.check_formats(formats.formats(make_info(quantization=INT4)))  # it does not say its own
    content["quantization"] = {"target": FP8, "drafter": None}
    file.write_text(json.dumps(content), encoding="utf-8")
    found = prediction.read(config(f"metrics.prediction={tmp_path}"))
    found.check_formats(formats.formats(make_info(quantization=FP8)))
    with pytest.raises(ConfigurationError, match=BOTH):
        found.check_formats(formats.formats(make_info()))
    prediction.read(config()).check_formats(formats.formats(make_info()))


def test_the_title_of_a_prediction_says_formats_unless_all_is_float() -> None:
    result = dict.fromkeys(("method", "target", "dtype", "device"), "x")
    assert "(" not in words.title(result)
    assert "(" not in words.title(result | {"quantization": {"target": None, "drafter": None}})
    said = words.title(result | {"quantization": {"target": FP8, "drafter": None}})
    assert "x (target fp8 per channel, inputs per token, drafter float), x" in said


def test_a_format_in_words() -> None:
    assert in_words(None) == in_words({}) == "float"
    assert in_words(FP8 | {"k_proj": FP8["q_proj"]}) == "fp8 per channel, inputs per token"
    mixed = FP8 | {"down_proj": "int4 group 16"}
    assert in_words(mixed) == (
        "fp8 per channel, inputs per token (q_proj); int4 group 16 (down_proj)"
    )
    plain = formats_of({"method": "none", "quantization": {"target": None, "drafter": None}})
    assert plain == Formats("float", None)
    assert formats_of({"method": "none"}) is None


def test_what_lines_share_and_where_they_differ() -> None:
    one, other = Formats("fp8", "float"), Formats("fp8", None)
    assert shared_words([one, one]) == "number formats: target fp8, drafter float"
    assert shared_words([one, other]) == shared_words([Formats("float", None)] * 2) == ""
    assert shared_words([None, None]) == shared_words([]) == ""
    assert columns([one, other]) == []
    assert columns([one, Formats("float", "fp8"), other]) == [
        ("target format", ["fp8", "float", "fp8"]),
        ("drafter format", ["float", "fp8", "-"]),
    ]


def test_a_run_prints_the_formats_and_has_them_on_its_page(
    run_config: Any, use_engine: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    use_engine(FakeEngine(quantization=FP8))
    run_config()
    said = "umber formats: target fp8 per channel, inputs per token, drafter float"
    assert f"N{said}" in capsys.readouterr().out
    assert f"n{said}" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
