"""Suffix decoding by the definition: strings are searched for in lists of texts."""

from __future__ import annotations

from dataclasses import dataclass

Text = list[int]
Place = tuple[int, int]  # a text, and the position in it after an occurrence


@dataclass(frozen=True, kw_only=True)
class PlainSuffix:
    """The continuations that `SuffixDrafts` should propose."""

    depth: int
    factor: float
    min_prob: float
    num_drafts: int

    def continuation(self, own: Text, finished: list[list[Text]], num_pending: int) -> Text:
        """The best continuation of `own`, from itself or from the groups of finished outputs, the
        newest group first."""
        best, score = self._best([own], own, num_pending, is_own=True)
        for group in finished:
            found, found_score = self._best(group, own, num_pending, is_own=False)
            if found_score > score:
                best, score = found, found_score
        return best

    def _best(
        self, texts: list[Text], own: Text, num_pending: int, *, is_own: bool
    ) -> tuple[Text, float]:
        best: Text = []
        score, before = 0.0, 0
        for length in range(min(self.depth - 1, len(own)), 0, -1):
            string = own[len(own) - length :]
            places = occurrences(texts, string)
            if len(places) < 1 + is_own:  # its own occurrence at the end is no match
                continue
            if len(places) > 1:
                num_followed = len(followed(texts, places))
                if num_followed == before:
                    continue
                before = num_followed
            most = min(self.num_drafts + num_pending, int(self.factor * length) + num_pending)
            found, found_score = self._path(texts, string, most, is_own=is_own)
            if found_score > score:
                best, score = found, found_score
        return best, score

    def _path(
        self, texts: list[Text], string: Text, most: int, *, is_own: bool
    ) -> tuple[Text, float]:
        drafts: Text = []
        prob, score = 1.0, 0.0
        places = occurrences(texts, string)
        while len(places) > 1 and len(string) < self.depth:
            after = followed(texts, places)
            if len(drafts) == most or not after:
                return drafts, score
            tokens = [texts[text][place] for text, place in after]
            # The most frequent token; of several, the one that came last.
            token = max(tokens, key=lambda t: (tokens.count(t), _last(tokens, t)))
            prob *= tokens.count(token) / len(tokens)
            if prob < self.min_prob:
                return drafts, score
            drafts.append(token)
            score += prob
            string = [*string, token]
            places = occurrences(texts, string)
        text, place = places[-1]  # copied from there; a text that ends goes on with the drafts
        whole = texts[text] + (drafts if is_own else [])
        while len(drafts) < most and place < len(whole):
            drafts.append(whole[place])
            whole = texts[text] + (drafts if is_own else [])
            place += 1
            score += prob
        return drafts, score


def _last(tokens: Text, token: int) -> int:
    return max(i for i, each in enumerate(tokens) if each == token)


def occurrences(texts: list[Text], string: Text) -> list[Place]:
    """Places after the occurrences of a string, in order."""
    n = len(string)
    return [
        (i, end)
        for i, text in enumerate(texts)
        for end in range(n, len(text) + 1)
        if text[end - n : end] == string
    ]


def followed(texts: list[Text], places: list[Place]) -> list[Place]:
    """Those of the places that a token stands at."""
    return [(text, place) for text, place in places if place < len(texts[text])]
