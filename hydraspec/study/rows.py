"""All jobs of a report as one table, for a tracker."""

from __future__ import annotations

from hydraspec.metrics.draft_lengths import drafts_of
from hydraspec.metrics.media import PlainTable
from hydraspec.study.comparison.pairs import ALL
from hydraspec.study.figures import figures_of
from hydraspec.study.groups import Runs

COLUMNS = (
    *("job", "settings", "group", "method", "num_speculative_tokens"),
    *("speedup", "speedup_low", "speedup_high", "acceptance_length"),
    *("tokens_per_second_per_user", "output_tokens_per_second", "lossless", "rank"),
)


def job_table(runs: Runs) -> PlainTable:
    """A line per job, in the order of the report."""
    rows = []
    for group in runs.groups:
        for job in group.jobs:
            of, ranked = figures_of(job, group), group.ranked(job)
            speed, length = of.speedups[ALL], of.lengths[ALL]
            low, high = (speed and speed["ci95"]) or (None, None)
            rows.append(
                [
                    *(job.name, job.label, group.title),
                    *(job.summary["method"], str(drafts_of(job.summary))),
                    *(speed and speed["mean"], low, high, length and length["mean"]),
                    *(of.speeds.tokens_per_second_per_user, of.speeds.tokens_per_second),
                    *(of.lossless["verdict"], ranked.rank if ranked else None),
                ]
            )
    return PlainTable(columns=COLUMNS, rows=rows)
