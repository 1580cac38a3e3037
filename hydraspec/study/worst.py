"""The requests whose drafts were accepted least, with rejected drafts where a trace has them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from hydraspec.metrics.files import Json
from hydraspec.metrics.media import speedup_of

MAX_REQUESTS = 8
MAX_REJECTED = 6  # rejected drafts shown for each request
MAX_CHARACTERS = 24  # shown of a token's text


@dataclass(slots=True, frozen=True, kw_only=True)
class Rejected:
    """A draft token that the target replaced, at a place in the output counted from 0; texts are
    empty without a tokenizer."""

    place: int
    draft: int
    target: int
    draft_text: str = ""
    target_text: str = ""

    @property
    def draft_words(self) -> str:
        """Id and text of the draft token."""
        return _in_words(self.draft, self.draft_text)

    @property
    def target_words(self) -> str:
        """Id and text of the target's token."""
        return _in_words(self.target, self.target_text)


@dataclass(slots=True, frozen=True, kw_only=True)
class WorstRequest:
    """A request as the page lists it; `speedup` and `num_rejected` are None where not known."""

    id: str
    category: str | None
    acceptance_length: float
    num_drafts: int
    speedup: float | None
    num_rejected: int | None
    rejected: Sequence[Rejected]  # the first ones


def worst_requests(
    rows: Sequence[Json], trace: Path | None, decode: Callable[[Sequence[int]], str] | None = None
) -> list[WorstRequest]:
    """The requests with the lowest acceptance length, lowest first.

    Args:
        rows: the rows of requests.jsonl.
        trace: the run's trace.jsonl; None: rejected drafts are not known.
        decode: returns the text of token ids; None: tokens get no text.
    """
    drafted = [row for row in rows if row["num_drafts"]]
    worst = sorted(drafted, key=_acceptance_length)[:MAX_REQUESTS]
    rejected = _rejected({row["id"]: len(row["prompt_token_ids"]) for row in worst}, trace)
    return [
        WorstRequest(
            id=row["id"],
            category=row["category"],
            acceptance_length=_acceptance_length(row),
            num_drafts=row["num_drafts"],
            speedup=speedup_of(row),
            num_rejected=len(rejected[row["id"]]) if trace else None,
            rejected=[_with_texts(each, decode) for each in rejected[row["id"]][:MAX_REJECTED]],
        )
        for row in worst
    ]


def _with_texts(one: Rejected, decode: Callable[[Sequence[int]], str] | None) -> Rejected:
    if decode is None:
        return one
    return replace(one, draft_text=decode([one.draft]), target_text=decode([one.target]))


def _in_words(token: int, text: str) -> str:
    """Id and text of a token, such as "290 ' the'", with visible escapes for characters that do not
    print. A token without text, such as a special one, is shown by its id alone."""
    if not text:
        return str(token)
    cut = text if len(text) <= MAX_CHARACTERS else text[: MAX_CHARACTERS - 1] + "…"
    return f"{token} {cut!r}"


def _acceptance_length(row: Json) -> float:
    return 1 + float(sum(row["accepted_per_position"]) / row["num_drafts"])


def _rejected(prompt_lengths: Mapping[str, int], trace: Path | None) -> dict[str, list[Rejected]]:
    """The first rejected draft of each step, by request id. Steps whose target token was cut off
    are left out."""
    found: dict[str, list[Rejected]] = {name: [] for name in prompt_lengths}
    if trace is None or not found:
        return found
    with trace.open(encoding="utf-8") as lines:
        for line in lines:
            step = json.loads(line)
            drafts, accepted = step["draft_token_ids"], step["num_accepted"]
            output = step["output_token_ids"]
            if step["request"] not in found or not accepted < min(len(drafts), len(output)):
                continue
            first = step["num_computed_tokens"] + 1 - prompt_lengths[step["request"]]
            found[step["request"]].append(
                Rejected(place=first + accepted, draft=drafts[accepted], target=output[accepted])
            )
    return found
