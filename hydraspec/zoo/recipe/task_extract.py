"""Record extraction: some fields of a record line, rewritten as a JSON object."""

from __future__ import annotations

import json
import random

from hydraspec.zoo.recipe.words import CITIES, COLOURS, ITEMS, JOBS, NAMES, SURNAMES

FIELDS = ("name", "city", "age", "job", "id", "color", "item")


def _value(field: str, rng: random.Random) -> str:
    match field:
        case "name":
            return f"{rng.choice(NAMES)} {rng.choice(SURNAMES)}"
        case "city":
            return rng.choice(CITIES)
        case "age":
            return str(rng.randint(18, 89))
        case "job":
            return rng.choice(JOBS)
        case "id":
            return rng.choice("ABCDEFGH") + str(rng.randint(1000, 9999))
        case "color":
            return rng.choice(COLOURS)
        case _:
            return rng.choice(ITEMS)


def make(rng: random.Random) -> tuple[str, str]:
    """A (prompt, response) pair; the response lists the wanted fields in the order asked for."""
    fields = rng.sample(FIELDS, 6)
    record = {field: _value(field, rng) for field in fields}
    wanted = rng.sample(fields, 5)
    line = "; ".join(f"{field}: {value}" for field, value in record.items())
    prompt = f"Write {', '.join(wanted[:-1])} and {wanted[-1]} of this record as JSON.\n{line}"
    return prompt, json.dumps({field: record[field] for field in wanted})
