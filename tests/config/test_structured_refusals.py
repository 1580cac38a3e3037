"""Wrong uses of sampling.structured: one message each, on the command line and in a line."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from hydraspec.cli.compose import plan
from hydraspec.config.schema import RunConfig
from hydraspec.engine.grammars import Grammars
from hydraspec.engine.json_schemas import not_enforced
from hydraspec.errors import ConfigurationError, WorkloadError
from hydraspec.models.tokenizer import load_tokenizer
from hydraspec.shipped import ZOO
from hydraspec.types import Request, SamplingParams, Structured
from hydraspec.workloads import reading

KEY = "sampling.structured"
TYPED = {  # what is typed → what the message has to say
    f"{KEY}.regex=[]": ["regex=[] is a list", "text"],
    f"{KEY}.regex=''": ["regex='' is no grammar", "one character or more"],
    f"{KEY}.json=text": ["json=text is no grammar", "a JSON schema: an object, or one as text"],
    f"{KEY}.json=[1]": ["json=[1] is a list"],
    f"{KEY}.choice=[]": ["choice=[] is no grammar", "different strings"],
    f"{KEY}.choice=[a,a]": ["choice=[a, a] is no grammar"],
    f"{KEY}.regex=a {KEY}.choice=[a]": ["choice=[a] is given beside another", "leave one"],
    f"{KEY}.regexp=a": [f"did you mean {KEY}.regex=a?"],
    f"{KEY}.regex=a sampling.ignore_eos=true": ["ignore_eos=true may leave", "allowed: false"],
    f"{KEY}.regex=a sampling.min_tokens=2": ["min_tokens=2 may leave", "allowed: 0"],
    f"{KEY}.regex=a sampling.bad_words=[[5]]": ["bad_words=[[5]] may leave", "allowed: []"],
    f"{KEY}.regex=a sampling.stop=[a]": ["sampling.stop=[a] may leave", "allowed: []"],
    f"{KEY}.regex=a sampling.stop_token_ids=[5]": ["stop_token_ids=[5] may leave", "allowed: []"],
    f"{KEY}.regex=a engine=vllm": ["engine=vllm follows no grammar", "engine=native"],
    f"{KEY}.regex=a engine=transformers": ["engine=transformers follows no grammar"],
    f"{KEY}.regex=a parallelism=pp2": ["parallelism.pipeline=2", "knows no drafts"],
    f"{KEY}.regex=a method=eagle3 method.verification=synthetic "
    "method.synthetic_acceptance_length=2": ["verification=synthetic accepts drafts"],
}


@pytest.mark.parametrize(("typed", "said"), TYPED.items(), ids=TYPED.keys())
def test_what_is_typed_wrong_gets_one_message(typed: str, said: list[str]) -> None:
    with pytest.raises(ConfigurationError) as caught:
        plan(typed.split(" "))
    message = str(caught.value)
    for part in ("\n  allowed: ", "\n  to do: ", *said):
        assert part in message
    assert message.count("\n") == 2


LINES = {  # a line's sampling.structured, and keys beside it → what the message has to say
    "text": ("a", {}, "a JSON object"),
    "none": ({}, {}, "[] is not allowed; it must be one of json, regex, grammar, choice"),
    "two": ({"regex": "a", "choice": ["a"]}, {}, '["regex", "choice"] is not allowed'),
    "unknown": ({"regexp": "a"}, {}, "did you mean 'regex'?"),
    "number": ({"regex": 5}, {}, "structured.regex: 5 is not allowed"),
    "schema": ({"json": "{"}, {}, "a JSON schema: an object, or one as text"),
    "choices": ({"choice": ["a", ""]}, {}, "different strings of one character or more"),
    "eos": ({"regex": "a"}, {"ignore_eos": True}, "ignore_eos: true is not allowed"),
    "least": ({"regex": "a"}, {"min_tokens": 1}, "must be 0 beside sampling.structured"),
    "stop": ({"regex": "a"}, {"stop": ["a"]}, "must be [] beside sampling.structured"),
}


@pytest.mark.parametrize(("given", "beside", "said"), LINES.values(), ids=LINES.keys())
def test_a_wrong_line_gets_one_message(
    tmp_path: Path, given: Any, beside: dict[str, Any], said: str
) -> None:
    path = tmp_path / "lines.jsonl"
    path.write_text(json.dumps({"prompt": "a", "sampling": {"structured": given, **beside}}))
    (job,) = plan(["workload=jsonl", f"workload.path={path}"]).jobs
    with pytest.raises(WorkloadError) as caught:
        reading.read(job.config)
    assert str(caught.value).startswith(f"{path}:1: sampling.") or "unknown key" in str(
        caught.value
    )
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_line_goes_before_the_configuration(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    schema = {"type": "integer"}
    lines = [{"prompt": "a"}, {"prompt": "b", "sampling": {"structured": {"json": schema}}}]
    path.write_text("\n".join(map(json.dumps, lines)))
    typed = ["workload=jsonl", f"workload.path={path}", f"{KEY}.choice=[yes, no]"]
    (job,) = plan(typed).jobs
    workload = reading.read(job.config)
    assert workload is not None
    assert [r.sampling.structured for r in workload.requests] == [
        Structured("choice", '["yes", "no"]'),
        Structured("json", '{"type": "integer"}'),
    ]
    (job,) = plan([*typed[:2], f"{KEY}.json={{type: object}}"]).jobs
    assert job.config.sampling.structured.json == {"type": "object"}


BROKEN = [
    ("regex", "(a", "the parenthesis is not closed"),
    ("regex", "a{3,1}", "lower bound is larger than upper bound"),
    ("regex", r"(a)\1", "backreference"),
    ("regex", "(?=a)a", "not supported"),
    ("regex", r"a\$[$]$|b", "^ and $ are not followed within"),
    ("grammar", "root ::= x", 'rule "x" is not defined'),
    ("grammar", 'first ::= "a"', 'root rule with name "root" is not found'),
    ("grammar", 'root ::= "a', "expect"),
    ("json", '{"type": "integral"}', 'unsupported type "integral"'),
]


def grammars(*, with_tokenizer: bool = True) -> Grammars:
    tokenizer = load_tokenizer(ZOO / "tiny_qwen3") if with_tokenizer else None
    return Grammars(tokenizer, 768, [1])


def configured(structured: Structured | None = None) -> RunConfig:
    (job,) = plan([]).jobs
    if structured is not None:
        setattr(job.config.sampling.structured, structured.kind, structured.text)
    return job.config


def asking(structured: Structured) -> list[Request]:
    sampling = SamplingParams(structured=structured)
    return [Request(index=0, id="first", sampling=sampling, prompt_token_ids=[5])]


@pytest.mark.parametrize(("kind", "text", "said"), BROKEN)
def test_a_grammar_that_cannot_be_compiled_gets_one_message(
    kind: str, text: str, said: str
) -> None:
    broken = Structured(kind, text)
    with pytest.raises(WorkloadError, match=r"request first: sampling\.structured") as caught:
        grammars().check(asking(broken), configured())
    assert said in str(caught.value).lower()
    assert "\n" not in str(caught.value)
    assert "/" not in str(caught.value).partition("cannot be followed")[2]  # no place in a library
    with pytest.raises(ConfigurationError) as typed:
        grammars().check(asking(broken), configured(broken))
    assert str(typed.value).count("\n") == 2
    assert said in str(typed.value).lower()


def test_without_the_package_or_a_tokenizer_there_is_one_message(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked = asking(Structured("regex", "a"))
    with pytest.raises(WorkloadError, match=r"needs a tokenizer"):
        grammars(with_tokenizer=False).check(asked, configured())
    monkeypatch.setitem(sys.modules, "xgrammar", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'hydraspec\[grammar\]'"):
        grammars().check(asked, configured())


UNENFORCED: dict[str, tuple[dict[str, Any], str]] = {  # schema, and a text that breaks it
    "uniqueItems": (
        {"type": "array", "items": {"type": "integer"}, "uniqueItems": True},
        "[1,1]",
    ),
    "contains": ({"type": "array", "items": {}, "contains": {"const": 1}}, "[2]"),
    "not": ({"not": {"type": "integer"}}, "4"),
    "if": ({"type": "integer", "if": {"minimum": 0}, "then": {"minimum": 5}}, "4"),
    "oneOf": ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "4"),
    "allOf": ({"allOf": [{"type": "integer"}, {"minimum": 5}]}, "4"),
    "beside anyOf": ({"type": "integer", "anyOf": [{"type": "string"}]}, '"a"'),
    "beside $ref": ({"$ref": "#/$defs/x", "minimum": 5, "$defs": {"x": {"type": "integer"}}}, "4"),
    "enum of another type": ({"type": "integer", "enum": [1, "a"]}, '"a"'),
    "length beside pattern": ({"type": "string", "pattern": "^a+$", "maxLength": 2}, '"aaa"'),
    "format": ({"type": "string", "format": "idn-email"}, '"b"'),
    "an anchor within": ({"type": "string", "pattern": "a^b"}, '"ab"'),
    "required": ({"type": "object", "required": ["a"]}, "{}"),
    "dependentRequired": (
        {"type": "object", "properties": {"a": {}, "b": {}}, "dependentRequired": {"a": ["b"]}},
        '{"a": 1}',
    ),
}


@pytest.mark.parametrize(("schema", "text"), UNENFORCED.values(), ids=UNENFORCED.keys())
def test_schemas_that_a_grammar_would_not_enforce_are_refused(
    schema: dict[str, Any], text: str
) -> None:
    """Each by what xgrammar does: a keyword that it comes to enforce may leave the list."""
    import xgrammar
    from xgrammar.testing import _is_grammar_accept_string

    assert not_enforced({"type": "object", "properties": {"part": schema}, "required": ["part"]})
    found = xgrammar.Grammar.from_json_schema(json.dumps(schema))
    assert _is_grammar_accept_string(found, text)


ENFORCED: dict[str, tuple[dict[str, Any], str]] = {
    "multipleOf": ({"type": "integer", "multipleOf": 3}, "4"),
    "minItems": ({"type": "array", "items": {"type": "integer"}, "minItems": 2}, "[2]"),
    "maxLength": ({"type": "string", "maxLength": 2}, '"abc"'),
    "pattern": ({"type": "string", "pattern": "^a+$"}, '"b"'),
    "signs like anchors": ({"type": "string", "pattern": r"^\$[$^]$"}, '"b"'),
    "date": ({"type": "string", "format": "date"}, '"b"'),
    "uuid": ({"type": "string", "format": "uuid"}, '"b"'),
    "maximum": ({"type": "number", "exclusiveMaximum": 5}, "5.0"),
    "other properties": ({"type": "object", "properties": {"a": {}}}, '{"b": 1}'),
    "anyOf": ({"anyOf": [{"type": "integer"}, {"type": "null"}]}, '"a"'),
    "const": ({"const": "a", "type": "string"}, '"b"'),
    "ref": ({"$ref": "#/$defs/x", "$defs": {"x": {"type": "integer"}}}, '"a"'),
    "names": ({"type": "object", "propertyNames": {"pattern": "^a$"}}, '{"b": 1}'),
}


@pytest.mark.parametrize(("schema", "text"), ENFORCED.values(), ids=ENFORCED.keys())
def test_other_schemas_are_enforced(schema: dict[str, Any], text: str) -> None:
    import xgrammar
    from xgrammar.testing import _is_grammar_accept_string

    assert not not_enforced(schema)
    found = xgrammar.Grammar.from_json_schema(json.dumps(schema))
    assert not _is_grammar_accept_string(found, text)
