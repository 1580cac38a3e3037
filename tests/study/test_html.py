"""Templates: strict, escaped, printable, and reading only what the summary's schema has."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_type_hints

import pytest
from jinja2 import UndefinedError, nodes

from hydraspec.metrics.summary import Lossless, Summary
from hydraspec.study import html
from hydraspec.study.blocks import Study, Verdict

VIEW = {
    "study": Study(question="<b>\x1b[2J</b>", sections=[]),
    "href": lambda run: None,
    "made": "made now",
}
RECORDS = {"summary": Summary, "lossless": Lossless}


def test_text_is_escaped_and_printable() -> None:
    page = html.render("study.html", **VIEW)
    assert page.startswith("<!doctype html>")
    assert "&lt;b&gt;\\x1b[2J&lt;/b&gt;" in page


def test_an_answer_its_reasons_and_what_to_do_stand_in_this_order() -> None:
    verdict = Verdict(
        kind="good", about="<load>", sentence="Use <a>.", reasons=["Why <b>."], to_do=["Run <c>."]
    )
    made = Study(question="q", verdicts=[verdict], sections=[])
    page = html.render("study.html", **VIEW | {"study": made})
    texts = ("answer good", "&lt;load&gt;", "Use &lt;a&gt;.", "Why &lt;b&gt;.", "Run &lt;c&gt;.")
    places = [page.index(text) for text in texts]
    assert places == sorted(places)
    assert verdict.text == "<load>: Use <a>. Why <b>. Next: Run <c>."


def test_a_name_that_the_view_lacks_is_an_error() -> None:
    with pytest.raises(UndefinedError, match="made"):
        html.render("study.html", **{k: v for k, v in VIEW.items() if k != "made"})


def keys_read(node: nodes.Node) -> Iterator[tuple[str, str]]:
    """(record, key) of every `summary.key` and `lossless.key` in a template."""
    for found in node.find_all(nodes.Getattr):
        if isinstance(found.node, nodes.Name) and found.node.name in RECORDS:
            yield found.node.name, found.attr


def test_templates_read_only_keys_of_the_schema() -> None:
    """Catches a misspelt key in a branch that no test renders."""
    environment = html.environment()
    keys: set[tuple[str, str]] = set()
    for name in environment.list_templates(["html"]):
        source, _, _ = environment.loader.get_source(environment, name)
        keys |= set(keys_read(environment.parse(source)))
    assert ("summary", "num_drafts") in keys
    assert {(r, key) for r, key in keys if key not in get_type_hints(RECORDS[r])} == set()
