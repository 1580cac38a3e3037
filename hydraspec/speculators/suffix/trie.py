"""Counts of all short strings of a growing text, in a trie that stores a string's continuations
once the string has occurred twice."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

ROOT = 0
END = -1  # stands after each of the texts that a trie holds
BYTES_PER_NODE = 176  # of a node, its key in the table of children, and its share of the text


@dataclass(slots=True)
class Path:
    """A continuation of a text, and its score: the sum of the probabilities of its prefixes, which
    is the number of its tokens that are expected to be right."""

    tokens: list[int] = field(default_factory=list)
    score: float = 0.0
    match: int = 0  # last tokens of the text that it follows


class SuffixTrie:
    """All strings of at most `depth` tokens in one or several texts, with how often they occur.

    A node is a string. One that has occurred once is a leaf: its continuation is read from the
    text. `append` takes a few operations for each suffix of the text that has occurred before.

    Attributes:
        tail: nodes of the last 0, 1, 2, … tokens of the present text, as far as these have occurred
            before and have fewer than `depth` tokens.
    """

    def __init__(self, depth: int, vocab_size: int) -> None:
        self.depth = depth
        self.num_texts = 0  # ended ones
        self.tail = [ROOT]
        self.text = array("i")
        self._vocab_size = vocab_size
        self._children: dict[int, int] = {}  # node * vocab_size + token -> node
        self._count = array("i", [0])  # occurrences
        self._followed = array("i", [0])  # occurrences with a token after them
        self._best = array("i", [ROOT])  # the child that occurred most; of several, the latest
        self._token = array("i", [END])  # the last token of the string
        self._place = array("i", [0])  # in the text, after the latest occurrence

    @property
    def num_nodes(self) -> int:
        """Number of nodes, which the memory is proportional to."""
        return len(self._count)

    def append(self, tokens: Iterable[int]) -> None:
        """Lengthen the present text."""
        text, children, vocab_size = self.text, self._children, self._vocab_size
        count, followed, best, place = self._count, self._followed, self._best, self._place
        for token in tokens:
            text.append(token)
            end, tail = len(text), [ROOT]
            for node in self.tail:
                followed[node] += 1
                child = children.get(node * vocab_size + token)
                if child is None:
                    child = self._add(node, token, end)
                else:
                    count[child] += 1
                    if len(tail) < self.depth:
                        if count[child] == 2:
                            self._expand(child)
                        tail.append(child)
                    place[child] = end
                if count[child] >= count[best[node]]:
                    best[node] = child
            del tail[self.depth :]
            self.tail = tail

    def end_text(self) -> None:
        """End the present text: no string goes on from it into the next one."""
        self.text.append(END)
        self.tail = [ROOT]
        self.num_texts += 1

    def _add(self, parent: int, token: int, place: int) -> int:
        node = len(self._count)
        self._children[parent * self._vocab_size + token] = node
        self._count.append(1)
        self._followed.append(0)
        self._best.append(ROOT)
        self._token.append(token)
        self._place.append(place)
        return node

    def _expand(self, node: int) -> None:
        """Add the continuation of a leaf's only occurrence so far."""
        place = self._place[node]
        token = self.text[place]
        if token != END:
            self._followed[node] = 1
            self._best[node] = self._add(node, token, place + 1)

    def step(self, entries: list[int], token: int) -> list[int]:
        """The `entries` of a text that is one token longer. An entry for each length from 0 on: the
        node of so many last tokens, or ~place of the only place after them."""
        text, children, longer = self.text, self._children, [ROOT]
        for entry in entries[: self.depth - 1]:
            if entry < 0:
                if text[~entry] != token:
                    break
                longer.append(entry - 1)
            else:
                child = children.get(entry * self._vocab_size + token)
                if child is None:
                    break
                longer.append(child if self._count[child] > 1 else ~self._place[child])
        return longer

    def best_path(self, entries: list[int], limits: Limits) -> Path:
        """The continuation with the highest score, of the longest match that has it. entries: as in
        `step`, or `tail`."""
        found, followed, count = Path(), self._followed, self._count
        before = 0
        for length in range(len(entries) - 1, 0, -1):
            most = min(limits.most, int(limits.factor * length) + limits.num_pending)
            if most <= found.score:
                break
            entry = entries[length]
            if entry < 0:
                path = self._copied(Path(), ~entry, most, 1.0)
            elif followed[entry] == before:  # the places of the longer match
                continue
            else:
                before = followed[entry]
                # No token of a path is more probable than its first one.
                if before and count[self._best[entry]] / before * most <= found.score:
                    continue
                path = self._path(entry, length, most, limits.min_prob)
            if path.score > found.score:
                found = path
                found.match = length
        return found

    def _path(self, node: int, length: int, most: int, min_prob: float) -> Path:
        """The most frequent tokens after the string of a node, while their probability is at least
        `min_prob`."""
        count, followed = self._count, self._followed
        tokens: list[int] = []
        prob, score = 1.0, 0.0
        while len(tokens) < most and followed[node]:
            child = self._best[node]
            prob *= count[child] / followed[node]
            if prob < min_prob:
                break
            tokens.append(self._token[child])
            score += prob
            length += 1
            if count[child] == 1 or length == self.depth:
                return self._copied(Path(tokens, score), self._place[child], most, prob)
            node = child
        return Path(tokens, score)

    def _copied(self, path: Path, place: int, most: int, prob: float) -> Path:
        """The path with the text from `place` on appended. At the text's end it goes on with the
        path itself, as the text repeats itself there."""
        text, tokens = self.text, path.tokens
        while len(tokens) < most:
            ahead = place - len(text)
            token = text[place] if ahead < 0 else tokens[ahead] if ahead < len(tokens) else END
            if token == END:
                break
            tokens.append(token)
            path.score += prob
            place += 1
        return path


@dataclass(slots=True, frozen=True, kw_only=True)
class Limits:
    """Limits of a continuation."""

    most: int  # tokens
    num_pending: int  # of its first tokens may be sampled already, on the device
    factor: float  # tokens after those, for each token of the match
    min_prob: float  # of all tokens so far
