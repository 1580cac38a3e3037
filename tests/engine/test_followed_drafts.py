"""A grammar along the drafts of a step, by a matcher in plain Python: masks after each draft,
drafts that the grammar decides, reasoning sections."""

from __future__ import annotations

from typing import Any

import pytest

from hydraspec.engine.grammars import MAX_TEXT, GrammarCosts, RequestGrammar

START, BODY, ALL = 1 << 7, (1 << 8) | 2, -1


class Recorder:
    """A matcher of the texts "7" + any number of "8", which end with token 1; `forced` is what it
    says of the text that has to come next."""

    def __init__(self, forced: str = "") -> None:
        self.text: list[int] = []
        self.forced = forced

    def find_jump_forward_string(self) -> str:
        assert not self.is_terminated()
        return self.forced

    def is_terminated(self) -> bool:
        return self.text[-1:] == [1]

    def fill_next_token_bitmask(self, words: Any, place: int) -> None:
        words[place] = 0
        words[place, 0] = 1 << 7 if not self.text else (1 << 8) | (1 << 1)

    def accept_token(self, token: int) -> bool:
        allowed = [7] if not self.text else [8, 1]
        if self.is_terminated() or token not in allowed:
            return False
        self.text.append(token)
        return True

    def rollback(self, count: int) -> None:
        assert count > 0
        del self.text[-count:]


def no_tokens(_: str) -> list[int]:
    raise AssertionError("no text has to come next")


@pytest.mark.parametrize(
    ("drafts", "words"),
    [
        ([], [START]),
        ([7, 8, 8], [START, BODY, BODY, BODY]),
        ([7, 5, 8], [START, BODY, ALL, ALL]),  # a draft that breaks the grammar
        ([5, 8, 8], [START, BODY, BODY, BODY]),  # one that the grammar decides
        ([-1, -1, -1], [START, BODY, ALL, ALL]),
        ([7, -1, -1], [START, BODY, ALL, ALL]),  # no draft
        ([7, 1, 8], [START, BODY, ALL, ALL]),  # tokens after the end are cut
    ],
)
def test_masks_are_those_after_each_draft(drafts: list[int], words: list[int]) -> None:
    matcher = Recorder()
    grammar = RequestGrammar(matcher, 20, GrammarCosts(), no_tokens)
    found = grammar.follow(drafts)
    assert found.masks[:, 0].tolist() == words
    assert found.drafts == [7, *drafts[1:]][: len(drafts)]
    assert found.decided == [0][: len(drafts)]
    assert matcher.text == []
    assert grammar.accept([7, 8]) == [7, 8]
    assert grammar.accept([8, 9, 8]) == [8]


@pytest.mark.parametrize(
    ("tokens", "drafts", "decided"),
    [
        ([8, 8], [7, 8, 8], [0, 1, 2]),
        ([8], [7, 1, 8], [0]),  # the last token of a text may be a longer one
        ([9, 8], [7, 1, 8], [0]),  # one that the grammar forbids at its place
        ([], [7, 1, 8], [0]),
    ],
)
def test_a_text_that_has_to_come_next_replaces_drafts(
    tokens: list[int], drafts: list[int], decided: list[int]
) -> None:
    """Whatever the drafter proposes there: if it depended on that, sampled drafts would be taken
    for others than those that were sampled."""
    grammar = RequestGrammar(Recorder("88"), 20, GrammarCosts(), {"88": tokens}.__getitem__)
    found = grammar.follow([5, 1, 8])
    assert (found.drafts, found.decided) == (drafts, decided)


def test_of_a_long_text_only_the_beginning_is_cut_into_tokens() -> None:
    """Else a constant of n characters would cost n^2 on its way."""
    seen: list[str] = []

    def tokens_of(text: str) -> list[int]:
        seen.append(text)
        return [8, 8]

    grammar = RequestGrammar(Recorder("8" * 100_000), 20, GrammarCosts(), tokens_of)
    assert grammar.follow([-1, -1, -1]).drafts == [7, 8, 8]
    assert seen == ["8" * MAX_TEXT] * 2


def test_reasoning_sections_are_free_text() -> None:
    """From one marker, 30, to the other, 31: in the output, or open at the prompt's end."""
    grammar = RequestGrammar(Recorder(), 40, GrammarCosts(), no_tokens, (30, 31))
    grammar.start_after(None)
    found = grammar.follow([30, 5, 31, 7])
    first = found.masks
    assert (found.drafts, found.decided) == ([30, 5, 31, 7], [3])
    assert first[0].tolist() == [START | 1 << 30, 0]
    assert first[1:4, 0].tolist() == [ALL, ALL, START]
    assert first[4, 0] == BODY
    assert grammar.accept([30, 9, 9]) == [30, 9, 9]
    assert grammar.follow([]).masks[0].tolist() == [ALL, ALL]
    assert grammar.accept([31, 7]) == [31, 7]
    assert grammar.follow([]).masks[0].tolist() == [BODY, 0]
    without = RequestGrammar(Recorder(), 40, GrammarCosts(), no_tokens, (30, 31))
    without.start_after(None)
    assert without.accept([7]) == [7]
    assert without.accept([30]) == []  # only the first token begins a section
    closed = RequestGrammar(Recorder(), 40, GrammarCosts(), no_tokens, (30, 31))
    closed.start_after(False)
    assert closed.follow([]).masks[0].tolist() == [START, 0]
    assert closed.accept([30]) == []
    opened = RequestGrammar(Recorder(), 40, GrammarCosts(), no_tokens, (30, 31))
    opened.start_after(True)
    assert opened.follow([]).masks[0].tolist() == [ALL, ALL]
