"""Counts of the short strings of a growing text, in a trie that is built where it is read."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

ROOT = 0
END = -1  # stands after each of the texts that a trie holds
NONE = -1  # no start
BYTES_PER_NODE = 176  # of a node with its key in the table of children; a token takes less


@dataclass(slots=True)
class Path:
    """A continuation of a text, and its score: the sum of the probabilities of its prefixes, which
    is the number of its tokens that are expected to be right."""

    tokens: list[int] = field(default_factory=list)
    score: float = 0.0
    match: int = 0  # last tokens of the text that it follows


class SuffixTrie:
    """All strings of at most `depth` tokens in one or several texts, with how often they occur.

    A node is a string that occurs more than once. It lists where its occurrences start, until it is
    read: then each goes on to the list of the child that is one token longer. A start is in one
    list at a time, so that all lists together take one number for each token. A child that occurs
    once is no node: in its place the table holds ~start, and its continuation is in the text.

    Attributes:
        is_full: a node was left unread, as more than `most_nodes` might have been made; from then
            on none is read.
    """

    def __init__(self, depth: int, vocab_size: int, most_nodes: int | None = None) -> None:
        self.depth = depth
        self.num_texts = 0  # ended ones
        self.text = array("i")
        self.is_full = False
        self._vocab_size, self._most_nodes = vocab_size, most_nodes
        self._latest: dict[int, int] = {}  # token -> start of its latest occurrence
        self._children: dict[int, int] = {}  # node * vocab_size + token -> node, or ~start
        self._before = array("i")  # by start: the one before it in the same list
        self._last = array("i", [0])  # the latest start of a node's occurrences
        self._read_to = array("i", [0])  # the latest of these that was read
        self._count = array("i", [0])  # occurrences, of nodes of two tokens or more
        self._followed = array("i", [0])  # occurrences that were read, with a token after them
        self._best = array("i", [END])  # the token after most of those; of several, the latest
        self._most = array("i", [0])  # occurrences of the node with that token

    @property
    def num_nodes(self) -> int:
        """Number of strings and tokens in tables, which the memory is proportional to."""
        return len(self._latest) + len(self._children) + len(self.text)

    def _has_room(self, num_more: int) -> bool:
        return self._most_nodes is None or self.num_nodes + num_more <= self._most_nodes

    def append(self, tokens: Sequence[int]) -> None:
        """Lengthen the present text."""
        latest, before = self._latest, self._before
        for start, token in enumerate(tokens, len(self.text)):
            before.append(latest.get(token, NONE))
            latest[token] = start
        self.text.extend(tokens)

    def end_text(self) -> None:
        """End the present text: no string goes on from it into the next one."""
        self.text.append(END)
        self._before.append(NONE)
        self.num_texts += 1

    def _one_token(self, token: int) -> int | None:
        """The entry of a string of one token; see `follow`."""
        start = self._latest.get(token)
        if start is None:
            return None
        node = self._children.get(token)
        if node is None:
            if self._before[start] == NONE:
                return ~start
            if not self._has_room(1):
                return None
            node = self._add(token, start)
        self._last[node] = start
        return node

    def _add(self, key: int, start: int) -> int:
        """Add a node for a string that has occurred once so far."""
        node = self._children[key] = len(self._count)
        self._last.append(start)
        self._read_to.append(NONE)
        self._count.append(1)
        self._followed.append(0)
        self._best.append(END)
        self._most.append(0)
        return node

    def _read(self, node: int, length: int) -> None:
        """Pass the occurrences of a node on to its children, but one at the end of the text."""
        before, text = self._before, self.text
        start, read_to = self._last[node], self._read_to[node]
        if start + length == len(text):
            start = before[start]
        if start <= read_to or self.is_full:
            return
        starts, older = [start], before[start]
        while older > read_to:
            starts.append(older)
            older = before[older]
        if not self._has_room(len(starts)):
            self.is_full = True
            return
        self._read_to[node] = start
        children, count, most = self._children, self._count, self._most[node]
        first_key, num_ends = node * self._vocab_size, 0
        for start in reversed(starts):
            token = text[start + length]
            if token == END:
                num_ends += 1
                continue
            key, times = first_key + token, 1
            child = children.get(key)
            if child is None:
                children[key] = ~start
                before[start] = NONE
            else:
                if child < 0:
                    child = self._add(key, ~child)
                before[start], self._last[child] = self._last[child], start
                times = count[child] = count[child] + 1
            if times >= most:
                self._best[node], most = token, times
        self._followed[node] += len(starts) - num_ends
        self._most[node] = most

    def follow(self, entries: Sequence[int], tokens: Sequence[int], num_new: int) -> list[int]:
        """Entries of a text that ends with `tokens`, from those that it had without the `num_new`
        last of these. There is one for each number of last tokens from 0 on, while these occur, and
        if the text is the trie's, while they have occurred before: their node, or ~start."""
        found, entry, length = [ROOT], self._one_token(tokens[-1]), 1
        size, longest, children = len(self.text), min(self.depth - 1, len(tokens)), self._children
        while entry is not None and (entry >= 0 or ~entry + length != size):
            found.append(entry)
            length += 1
            known = length - num_new if length > num_new else 0
            if length > longest or known >= len(entries):
                break
            entry = entries[known]
            if num_new == 1 and entry > ROOT:
                self._read(entry, known)
                entry = children.get(entry * self._vocab_size + tokens[-1])
            else:
                entry = self._descend(entry, known, tokens[len(tokens) - length + known :])
        return found

    def _descend(self, entry: int, length: int, tokens: Sequence[int]) -> int | None:
        """The entry of the string of `entry`, which has `length` tokens, with `tokens` after it;
        None if that does not occur."""
        for number, token in enumerate(tokens, length):
            if number == 0:
                found = self._one_token(token)
            elif entry < 0:
                found = entry if self.text[~entry + number] == token else None
            else:
                self._read(entry, number)
                found = self._children.get(entry * self._vocab_size + token)
            if found is None:
                return None
            entry = found
        return entry

    def best_path(self, entries: Sequence[int], limits: Limits) -> Path:
        """The continuation with the highest score, of the longest match that has it. entries: see
        `follow`."""
        found, followed = Path(), self._followed
        before = 0
        for length in range(len(entries) - 1, 0, -1):
            most = min(limits.most, int(limits.factor * length) + limits.num_pending)
            if most <= found.score:
                break
            entry = entries[length]
            if entry < 0:
                path = self._copied(Path(), ~entry + length, most, 1.0)
            else:
                self._read(entry, length)
                if followed[entry] in (0, before):  # the places of the longer match
                    continue
                before = followed[entry]
                # No token of a path is more probable than its first one.
                if self._most[entry] / before * most <= found.score:
                    continue
                path = self._path(entry, length, most, limits.min_prob)
            if path.score > found.score:
                found = path
                found.match = length
        return found

    def _path(self, node: int, length: int, most: int, min_prob: float) -> Path:
        """The most frequent tokens after the string of a node, while their probability is at least
        `min_prob`."""
        tokens: list[int] = []
        prob, score = 1.0, 0.0
        while len(tokens) < most:
            self._read(node, length)
            if not self._followed[node]:
                break
            prob *= self._most[node] / self._followed[node]
            if prob < min_prob:
                break
            tokens.append(self._best[node])
            score += prob
            length += 1
            child = self._children[node * self._vocab_size + tokens[-1]]
            if child < 0 or length == self.depth:
                start = ~child if child < 0 else self._last[child]
                return self._copied(Path(tokens, score), start + length, most, prob)
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
