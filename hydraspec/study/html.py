"""HTML pages from the templates of this package, with escaped text and strict names.

The modules that call `render` compute the contents of a page; the templates hold the HTML.
"""

from __future__ import annotations

import os
import time
from functools import cache
from pathlib import Path
from urllib.parse import quote

from jinja2 import Environment, PackageLoader, StrictUndefined

from hydraspec.errors import printable
from hydraspec.metrics.run_files import BENCH_REPORT, REPORT
from hydraspec.study.blocks import Study
from hydraspec.study.texts import (
    engine_words,
    estimate,
    interval_note,
    limit_words,
    load_words,
    milliseconds,
    number,
    percent,
    percentile_words,
)


def render(template: str, **view: object) -> str:
    """The HTML of a template filled from `view`. Text in `view` is escaped, a name that `view`
    lacks is an error, and control characters become visible escapes.
    """
    return printable(environment().get_template(template).render(view))


def study_page(made: Study, folder: Path) -> str:
    """The HTML of a report, with links to runs' pages that are relative to `folder`."""

    def href(run: Path) -> str | None:
        return link_to_page(run, folder)

    when = f"made {time.strftime('%Y-%m-%d %H:%M')}"
    return render("study.html", study=made, href=href, made=when)


def link_to_page(run: Path, folder: Path) -> str | None:
    """The relative address of a run's or benchmark's page, seen from a page in `folder`; None where
    there is no such page."""
    pages = [run / name for name in (REPORT, BENCH_REPORT) if (run / name).is_file()]
    return quote(os.path.relpath(pages[0], folder).replace(os.sep, "/")) if pages else None


@cache
def environment() -> Environment:
    """The Jinja environment of the templates, with their filters."""
    made = Environment(
        loader=PackageLoader("hydraspec.study"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "number": number,
        "percent": percent,
        "engine_words": engine_words,
        "load_words": load_words,
        "percentile_words": percentile_words,
        "limit_words": limit_words,
        "interval": lambda *found: estimate(*found).replace(" to ", "\u00a0to\u00a0"),
        "interval_note": interval_note,
        "milliseconds": milliseconds,
        "exact_match": lambda marks: number(marks["exact_match"], 3) if marks else "-",
        "margin": lambda margin: "-" if margin is None else f"{margin:.3g}",
        "listed": lambda facts: ", ".join(
            f"{k}: {v}" for k, v in facts.items() if v not in (None, "", [], ())
        ),
    }
    return made
