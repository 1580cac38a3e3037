"""Random grammars of every kind whose texts are short, each with a check of texts."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from dataclasses import dataclass, field

from drawn_schemas import drawn_schema, is_valid

from hydraspec.types import Structured

WORDS = ("red", "blue", "Porto", "id", "x", "no", "7")
CLASSES = ("[a-f]", "[0-9]", "[A-Z]", "[xyz7]")


@dataclass(frozen=True)
class Drawn:
    """A grammar, and whether a text follows it."""

    structured: Structured
    follows: Callable[[str], bool]


def drawn_grammar(rng: random.Random) -> Drawn:
    """A JSON schema in seven of ten cases, a regular expression in two, else EBNF."""
    kind = rng.choices(("json", "regex", "grammar"), (7, 2, 1))[0]
    if kind == "json":
        schema = drawn_schema(rng)
        return Drawn(
            Structured("json", json.dumps(schema)),
            lambda text: is_valid(json.loads(text), schema),
        )
    expression = _Expression(rng)
    regex, ebnf = expression.sequence(2)
    rules = "\n".join([f"root ::= {ebnf}", *expression.rules])
    return Drawn(
        Structured(kind, regex if kind == "regex" else rules),
        lambda text: re.fullmatch(regex, text) is not None,
    )


@dataclass
class _Expression:
    """Draws parts of an expression, each as a regular expression and as EBNF."""

    rng: random.Random
    rules: list[str] = field(default_factory=list)  # of EBNF, beside root

    def sequence(self, depth: int) -> tuple[str, str]:
        parts = [self._part(depth) for _ in range(self.rng.randint(1, 3))]
        return "".join(regex for regex, _ in parts), " ".join(ebnf for _, ebnf in parts)

    def _part(self, depth: int) -> tuple[str, str]:
        kind = self.rng.choice(("word", "class", "either", "rule") if depth else ("word", "class"))
        if kind == "word":
            word = self.rng.choice(WORDS)
            return word, json.dumps(word)
        if kind == "class":
            least = self.rng.randint(0, 2)
            found = self.rng.choice(CLASSES) + f"{{{least},{least + self.rng.randint(1, 4)}}}"
            return found, found
        (regex, ebnf), (other, other_ebnf) = self.sequence(depth - 1), self.sequence(depth - 1)
        mark = self.rng.choice(("", "?"))
        if kind == "rule":
            name = f"rule{len(self.rules)}"
            self.rules.append(f"{name} ::= {ebnf} | {other_ebnf}")
            return f"(?:{regex}|{other}){mark}", f"{name}{mark}"
        return f"(?:{regex}|{other}){mark}", f"({ebnf} | {other_ebnf}){mark}"
