"""The prediction of `python -m hydraspec.predict` for a run, which is shown beside its speedup."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

from hydraspec.config.messages import listing, refusal
from hydraspec.config.schema import PerStep, RunConfig
from hydraspec.lab.formats import check_same
from hydraspec.metrics.files import Json
from hydraspec.metrics.formats import Formats, formats_of
from hydraspec.metrics.run_files import PREDICTION, read_object
from hydraspec.metrics.summary import Interval, Prediction

KEY = "metrics.prediction"


@dataclass(slots=True, frozen=True)
class Expected:
    """The prediction for a run's K and concurrency, None without one, and warnings about it; the
    value of the key that names it, and the number formats that it was measured in."""

    figures: Prediction | None = None
    warnings: list[str] = field(default_factory=list)
    given: str = ""
    formats: Formats | None = None

    def check_formats(self, loaded: Formats) -> None:
        """Refuse a prediction of other number formats than those loaded.

        Raises:
            ConfigurationError: naming both formats.
        """
        remedy = "make one with python -m hydraspec.predict and the keys of this run"
        check_same(KEY, self.given, self.formats, loaded, remedy)

    def beside(self, speedup: Interval | None) -> Prediction | None:
        """The figures with their error relative to the measured speedup, if there is one; None
        without a prediction."""
        if self.figures is None or speedup is None or speedup["mean"] is None:
            return self.figures
        return {**self.figures, "error": self.figures["speedup"] / speedup["mean"] - 1}


def read(config: RunConfig) -> Expected:
    """The prediction that `metrics.prediction` names: a predict.json, its folder, or the folder of
    a sweep of them. An empty Expected if the key is null, or with method=none.

    Raises:
        ConfigurationError: the key names no prediction of this target and method.
    """
    given = config.metrics.prediction
    if given is None or config.method.name == "none":
        return Expected()
    found = _read(Path(given).expanduser())
    wanted = (config.target.name, config.method.name)
    match = [each for each in found if (each["target"], each["method"]) == wanted]
    if not match:
        made = listing({f"{each['method']} on {each['target']}" for each in found})
        raise refusal(
            KEY,
            given,
            f"holds no prediction of {wanted[1]} on {wanted[0]}",
            allowed=f"predictions: {made}" if found else f"a folder with {PREDICTION} in it",
            remedy="make one with python -m hydraspec.predict and the keys of this run",
        )
    k, at_once = config.method.num_speculative_tokens, _at_once(config)
    for row in match[-1]["predictions"]:
        if (row["num_speculative_tokens"], row["concurrency"]) == (k, at_once):
            return replace(_expected(row), given=given, formats=formats_of(match[-1]))
    drafts = k.value if isinstance(k, PerStep) else k
    return Expected(None, [f"{KEY}={given} says nothing of K={drafts} at concurrency {at_once}"])


def _expected(row: Json) -> Expected:
    figures: Prediction = {
        "speedup": row["speedup"],
        "acceptance_length": row["acceptance_length"],
        "break_even_acceptance_length": row["break_even_acceptance_length"],
        "error": None,
    }
    if row["speedup"] >= 1:
        return Expected(figures)
    return Expected(
        figures,
        [
            f"this run is predicted to be slower than no drafts: {row['speedup']:.2f}x at "
            f"acceptance length {row['acceptance_length']:.2f}, since a step takes as long as "
            f"{row['break_even_acceptance_length']:.2f} without drafts"
        ],
    )


def _at_once(config: RunConfig) -> int:
    wanted, slots = config.workload.concurrency, config.engine.max_num_seqs
    return slots if wanted is None else min(wanted, slots)


def _read(path: Path) -> list[Json]:
    """Contents of the prediction files at `path`: a file, its folder, or the folder of a sweep."""
    files = [path] if path.is_file() else [path / PREDICTION, *sorted(path.glob(f"*/{PREDICTION}"))]
    found = [read_object(file) or {} for file in files]
    return [each for each in found if {"target", "method", "predictions"} <= {*each}]
