"""predict.html: the table of predictions, and beside it what was measured."""

from __future__ import annotations

from hydraspec.metrics.files import Json
from hydraspec.predict.words import cells, header, sentences, title
from hydraspec.report import html


def page_of(result: Json) -> str:
    """The page of the content of predict.json."""
    return html.render(
        "bench.html",
        title=title(result),
        heading="By requests at once and drafts a step",
        header=header(result),
        lines=[*map(cells(result), result["predictions"])],
        notes=[("", text) for text in sentences(result)],
    )
