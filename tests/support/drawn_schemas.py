"""Random JSON schemas whose texts are short, and a validator for them in plain Python."""

from __future__ import annotations

import random
import re
from typing import Any

NAMES = ("name", "job", "city", "color", "id", "age", "items", "value")


def drawn_schema(rng: random.Random, depth: int = 0) -> dict[str, Any]:
    """An object schema with a few properties, some of which are required."""
    names = rng.sample(NAMES, rng.randint(1, 3 - depth))
    return {
        "type": "object",
        "properties": {name: _drawn(rng, depth + 1) for name in names},
        "required": [name for name in names if rng.random() < 0.8],
        "additionalProperties": False,
    }


def _drawn(rng: random.Random, depth: int) -> dict[str, Any]:
    kinds = ["string", "pattern", "integer", "number", "boolean", "null", "enum", "const", "any"]
    if depth < 2:
        kinds += ["array", "object", "tuple", "one of two objects"]
    kind = rng.choice(kinds)
    if kind == "string":
        least = rng.randint(0, 3)
        return {"type": "string", "minLength": least, "maxLength": least + rng.randint(0, 9)}
    if kind == "pattern":
        return {
            "type": "string",
            "pattern": rng.choice(["^[a-z]{2,6}$", "^A[0-9]{4}$", "^(x+|y)$"]),
        }
    if kind == "integer":
        least = rng.randint(-50, 50)
        return {"type": "integer", "minimum": least, "maximum": least + rng.randint(0, 900)}
    if kind == "number":
        least = rng.randint(-20, 20) / 4
        return {"type": "number", "minimum": least, "maximum": least + rng.randint(1, 400) / 4}
    if kind in ("boolean", "null"):
        return {"type": kind}
    if kind == "enum":
        return {"enum": rng.sample(["red", "blue", 3, None, True, "tailor"], 3)}
    if kind == "const":
        return {"const": rng.choice(["Porto", 7, False])}
    if kind == "any":
        return {"anyOf": [{"type": "null"}, {"type": "string", "maxLength": 5}]}
    if kind == "one of two objects":
        return {"anyOf": [drawn_schema(rng, depth), drawn_schema(rng, depth)]}
    if kind == "tuple":
        return {
            "type": "array",
            "prefixItems": [_drawn(rng, 2), _drawn(rng, 2)],
            "items": False,
            "minItems": 2,
        }
    if kind == "array":
        least = rng.randint(0, 2)
        return {
            "type": "array",
            "items": _drawn(rng, 2),
            "minItems": least,
            "maxItems": least + rng.randint(0, 2),
        }
    return drawn_schema(rng, depth)


def is_valid(value: Any, schema: Any) -> bool:
    """Returns whether a value has a schema of the keywords above, and of few others."""
    if isinstance(schema, bool):
        return schema
    if "anyOf" in schema:
        return any(is_valid(value, each) for each in schema["anyOf"])
    if "const" in schema:
        return _same(value, schema["const"])
    if "enum" in schema:
        return any(_same(value, each) for each in schema["enum"])
    kind = schema["type"]
    if kind == "string":
        return (
            isinstance(value, str)
            and schema.get("minLength", 0) <= len(value) <= schema.get("maxLength", 1 << 30)
            and re.search(schema.get("pattern", ""), value) is not None
        )
    if kind in ("integer", "number"):
        least, most = schema.get("minimum", -1e30), schema.get("maximum", 1e30)
        types = int if kind == "integer" else (int, float)
        return isinstance(value, types) and not isinstance(value, bool) and least <= value <= most
    if kind in ("boolean", "null"):
        return isinstance(value, bool) if kind == "boolean" else value is None
    if kind == "array":
        first = schema.get("prefixItems", [])
        rest = schema.get("items", True)
        return (
            isinstance(value, list)
            and schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", 1 << 30)
            and all(map(is_valid, value, first))
            and all(is_valid(each, rest) for each in value[len(first) :])
        )
    known = schema.get("properties", {})
    return (
        isinstance(value, dict)
        and set(schema.get("required", ())) <= set(value) <= set(known)
        and all(is_valid(each, known[name]) for name, each in value.items())
    )


def _same(one: Any, other: Any) -> bool:
    return type(one) is type(other) and bool(one == other)
