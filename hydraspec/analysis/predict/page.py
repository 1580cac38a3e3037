"""predict.html: the predictions as bars and as a table, and beside them what was measured."""

from __future__ import annotations

from hydraspec.analysis.predict.words import best_rows, cells, header, sentences, title
from hydraspec.metrics.files import Json
from hydraspec.study import html
from hydraspec.study.charts import Bar, horizontal_bars


def page_of(result: Json) -> str:
    """The page of the content of predict.json."""
    rows, best = result["predictions"], best_rows(result)
    bars = [
        Bar(
            label=f"{row['concurrency']} at once, K={row['num_speculative_tokens']}",
            value=row["speedup"],
            text=f"{row['speedup']:.2f}x",
            color=_color(row["speedup"], is_best=i in best),
        )
        for i, row in enumerate(rows)
    ]
    return html.render(
        "predict.html",
        title=title(result),
        sentences=list(sentences(result)),
        speedups=horizontal_bars(bars, description="Predicted speedup by K", mark=1.0),
        header=header(result),
        lines=[*map(cells(result), rows)],
        best=best,
    )


def _color(speedup: float, *, is_best: bool) -> str:
    if speedup < 1:
        return "var(--bad)"
    return "var(--good)" if is_best else "var(--method)"
