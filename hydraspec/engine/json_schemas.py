"""Keywords of JSON schemas that grammars do not enforce: schemas that need them are refused, since
an output could otherwise break its schema.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

NEVER = (
    *("uniqueItems", "contains", "minContains", "maxContains", "dependentRequired"),
    *("dependentSchemas", "dependencies", "not", "if", "then", "else", "oneOf", "$dynamicRef"),
)
ANNOTATIONS = {
    *("title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"),
    *("$schema", "$id", "$comment", "$defs", "definitions"),
}
ALONE = ("$ref", "anyOf", "allOf", "const")  # keywords beside which others are not read
FORMATS = (
    *("date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri"),
    *("uri-reference", "uri-template", "uuid", "json-pointer", "relative-json-pointer"),
)
SCHEMAS = ("items", "additionalProperties", "unevaluatedProperties", "unevaluatedItems")
LISTS, MAPPINGS = ("anyOf", "allOf", "prefixItems"), ("properties", "patternProperties")
TYPES: Mapping[str, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "null": (type(None),),
    "array": (list,),
    "object": (dict,),
}


def has_inner_anchor(regex: str) -> bool:
    """Returns whether ^ or $ stands within a regular expression, where grammars pass over it."""
    rest = re.sub(r"\\.|\[(?:\\.|[^\]\\])*\]", "", regex)  # without escapes and classes
    return bool(set("^$") & set(rest.removeprefix("^").removesuffix("$")))


def not_enforced(schema: Any) -> str:
    """The first part of a schema that a grammar would not enforce, in words; "" if none is."""
    return next(_problems(schema, "#"), "")


def _problems(schema: Any, place: str) -> Iterator[str]:
    if isinstance(schema, bool):
        return
    if not isinstance(schema, dict):
        yield f"{place} is no schema, but {type(schema).__name__}"
        return
    for key in NEVER:
        if schema.get(key, False) is not False:
            more = ", write anyOf" if key == "oneOf" else ""
            yield f"{place}: the keyword {key} is not enforced{more}"
    yield from _beside(schema, place)
    if "pattern" in schema and ("minLength" in schema or "maxLength" in schema):
        yield f"{place}: minLength and maxLength are not enforced beside pattern"
    for pattern in (schema.get("pattern", ""), *schema.get("patternProperties", ())):
        if has_inner_anchor(pattern):
            yield f"{place}: ^ and $ within the pattern {pattern} are not enforced"
    if (name := schema.get("format")) is not None and name not in FORMATS:
        yield f"{place}: the format {name} is not enforced"
    yield from _values(schema, place)
    for key, part in _parts(schema):
        yield from _problems(part, f"{place}/{key}")


def _beside(schema: Mapping[str, Any], place: str) -> Iterator[str]:
    for key in ALONE:
        others = schema.keys() - ANNOTATIONS - {key, *(("type",) if key == "const" else ())}
        if key in schema and others:
            yield f"{place}: {min(others)} is not enforced beside {key}"
    if len(schema.get("allOf", ())) > 1:
        yield f"{place}: allOf of several schemas is not enforced"
    known = schema.get("properties", {})
    for name in schema.get("required", ()):
        if name not in known and "patternProperties" not in schema:
            yield f"{place}: {name} is required and stands in no properties"


def _values(schema: Mapping[str, Any], place: str) -> Iterator[str]:
    """Values of enum and const that are not of the schema's type, which is not read there."""
    others = schema.keys() - ANNOTATIONS - {"enum", "type"}
    if "enum" in schema and others:
        yield f"{place}: {min(others)} is not enforced beside enum"
    given = schema.get("type", list(TYPES))
    types = [given] if isinstance(given, str) else given
    values = [*schema.get("enum", ()), *([schema["const"]] if "const" in schema else [])]
    for value in values:
        if not any(_is(value, name) for name in types):
            yield f"{place}: {value!r} is not of type {given}"


def _is(value: object, name: str) -> bool:
    kinds = TYPES.get(name, ())
    return isinstance(value, kinds) and (name == "boolean" or not isinstance(value, bool))


def _parts(schema: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for key in (*SCHEMAS, "propertyNames"):
        if key in schema:
            yield key, schema[key]
    for key in LISTS:
        yield from ((f"{key}/{i}", part) for i, part in enumerate(schema.get(key, ())))
    for key in (*MAPPINGS, "$defs", "definitions"):
        yield from ((f"{key}/{name}", part) for name, part in schema.get(key, {}).items())
