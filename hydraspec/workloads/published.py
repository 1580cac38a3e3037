"""Published benchmarks as workload lines: a file in the format in which it is released becomes
lines as `workload=jsonl` has them. No code of a benchmark, and none that a model writes, is run.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hydraspec.config.messages import refusal
from hydraspec.config.schema import WorkloadConfig
from hydraspec.config.workloads import SOURCES
from hydraspec.types import WorkloadError
from hydraspec.workloads.lines import shown

Line = dict[str, Any]
SOLVE = "Solve this step by step. Write the final number on the last line, after ####."
COMPLETE = "Complete this Python function. Answer with the whole function."
# Stops of HumanEval's paper (Chen et al., 2021, 2.1): what follows is no part of the function.
ENDS_OF_A_FUNCTION = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
SPEAKERS = {  # "from" of ShareGPT's messages → role
    **{"human": "user", "user": "user", "system": "system"},
    **dict.fromkeys(("gpt", "chatgpt", "bing", "bard", "assistant"), "assistant"),
}
SCORINGS: dict[str, Literal["number", "defines"]] = {"gsm8k": "number", "humaneval": "defines"}
CALCULATIONS = re.compile(r"<<.*?>>")  # annotations in GSM8K's answers
PARQUET = b"PAR1"  # the first bytes of a file in that format
UNRESOLVED = "FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE"  # begins a placeholder
OF_SPEED_BENCH = ("sub_category", "difficulty", "source", "src_id")  # keys kept in `meta`


@dataclass(slots=True, frozen=True)
class Record:
    """An entry of a benchmark's file."""

    place: str  # "file:line", or "file, entry n" of a JSON array
    values: Mapping[str, Any]

    def text(self, key: str) -> str:
        """The text of a key that must have one.

        Raises:
            WorkloadError: with the place; the value is no text, or blank.
        """
        value = self.values.get(key)
        if not isinstance(value, str) or not value.strip():
            raise self.error(f"{key}: {shown(value)} is not allowed; it must be a text")
        return value

    def error(self, problem: str) -> WorkloadError:
        """The WorkloadError of a problem, which begins with the record's place."""
        return WorkloadError(f"{self.place}: {problem}")


def records(name: str, content: bytes) -> list[Record]:
    """The objects of a file of JSON lines or of one JSON array, or the rows of a Parquet file.

    Raises:
        WorkloadError: with the place of the first entry that is no JSON object; the file is in
            Parquet format, and pyarrow is missing or cannot read it.
    """
    if content.startswith(PARQUET):
        return _rows(name, content)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise WorkloadError(f"{name}: not UTF-8 text (byte {error.start})") from None
    if text.lstrip().startswith("["):
        entries = _parsed(name, text)
        found = [Record(f"{name}, entry {i}", each) for i, each in enumerate(entries, start=1)]
    else:
        lines = enumerate(text.split("\n"), start=1)
        numbered = [(f"{name}:{i}", line) for i, line in lines if line.strip()]
        found = [Record(place, _parsed(place, line)) for place, line in numbered]
    for record in found:
        if not isinstance(record.values, dict):
            raise record.error("must be a JSON object")
    if not found:
        raise WorkloadError(f"{name}: there is nothing in it")
    return found


def _rows(name: str, content: bytes) -> list[Record]:
    try:
        from pyarrow import parquet
    except ImportError:
        raise WorkloadError(
            f"{name}: a Parquet file, which needs pyarrow: "
            'pip install "hydraspec[workloads]", or give the rows as JSON lines'
        ) from None
    try:
        rows = parquet.read_table(io.BytesIO(content)).to_pylist()
    except (OSError, ValueError) as error:  # pyarrow's errors are kinds of both
        problem = str(error).splitlines()[0]
        raise WorkloadError(
            f"{name}: cannot be read as a Parquet file: {problem}; get the file again"
        ) from None
    if not rows:
        raise WorkloadError(f"{name}: there is nothing in it")
    return [Record(f"{name}, row {i}", row) for i, row in enumerate(rows, start=1)]


def _parsed(place: str, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WorkloadError(f"{place}: not JSON: {error}") from None


# ---------------------------------------------------------------- formats


Read = Callable[[str], tuple[str, bytes]]  # path → name for messages, content


def left_out(config: WorkloadConfig, found: Sequence[Record]) -> list[str]:
    """Warnings about conversations of ShareGPT that are left out, in whole or in part."""
    if config.name != "sharegpt":
        return []
    parts = [_users_part(record) for record in found]
    empty = sum(not turns for _, turns, _ in parts)
    headless = sum(is_headless and bool(turns) for _, turns, is_headless in parts)
    warnings = []
    if empty:
        what = "have no message of a user, and are left out"
        warnings.append(f"{empty} of {len(found)} conversations {what}")
    if headless:
        what = "begin with an answer, which is left out"
        warnings.append(f"{headless} of {len(found)} conversations {what}")
    return warnings


def _gsm8k(
    config: WorkloadConfig, found: Sequence[Record], read: Read
) -> Iterator[tuple[str, Line]]:
    """Lines of GSM8K, whose entries are {"question", "answer": "… #### 42"}; only examples keep the
    whole answer."""
    count, own = config.num_shots, config.shots_path is None
    shots = found if config.shots_path is None else records(*read(config.shots_path))
    asked = found[count:] if own else found
    if len(shots) < count or not asked:
        raise refusal(
            "workload.num_shots",
            count,
            f"is more than {config.shots_path or config.path} has to give: {len(shots)} lines",
            allowed=f"0 to {len(shots) - own}",
            remedy="lower it, or give more examples with workload.shots_path",
        )
    examples = [(shot.text("question").strip(), _solution(shot)) for shot in shots[:count]]
    for record in asked:
        question = record.text("question").strip()
        answer = _solution(record).rpartition("####")[2].strip()
        line = _chat(question, examples) if config.chat else _plain(question, examples)
        yield record.place, {**line, "answer": answer, "category": "math"}


def _solution(record: Record) -> str:
    answer = CALCULATIONS.sub("", record.text("answer")).strip()
    if not re.search(r"####\s*[-$]?[\d.]", answer):
        raise record.error(
            f"answer: {shown(answer)} is not allowed; it must end with #### <number>"
        )
    return answer


def _chat(question: str, examples: Sequence[tuple[str, str]]) -> Line:
    messages = []
    for asked, solved in examples:
        messages.append({"role": "user", "content": f"{asked}\n\n{SOLVE}"})
        messages.append({"role": "assistant", "content": solved})
    return {"messages": [*messages, {"role": "user", "content": f"{question}\n\n{SOLVE}"}]}


def _plain(question: str, examples: Sequence[tuple[str, str]]) -> Line:
    """A question after examples as plain text; output stops before a next question."""
    before = "".join(f"Question: {asked}\nAnswer: {solved}\n\n" for asked, solved in examples)
    return {
        "prompt": f"{before}Question: {question}\nAnswer:",
        "sampling": {"stop": ["\nQuestion:"]},
    }


def _humaneval(
    config: WorkloadConfig, found: Sequence[Record], read: Read
) -> Iterator[tuple[str, Line]]:
    """Lines of HumanEval, whose entries are {"task_id", "prompt", "entry_point", …}: the beginning
    of a function, to be completed; the answer is the name of the function."""
    for record in found:
        prompt, name = record.text("prompt"), record.text("entry_point")
        line: Line = {
            "id": record.text("task_id"),
            "category": "code",
            "answer": name,
            "meta": {"entry_point": name},
        }
        if config.chat:
            content = f"{COMPLETE}\n\n```python\n{prompt.rstrip()}\n```"
            line["messages"] = [{"role": "user", "content": content}]
        else:
            line |= {"prompt": prompt, "sampling": {"stop": list(ENDS_OF_A_FUNCTION)}}
        yield record.place, line


def _questions(
    config: WorkloadConfig, found: Sequence[Record], read: Read
) -> Iterator[tuple[str, Line]]:
    """Lines of MT-bench and Spec-Bench, whose entries are {"question_id", "category", "turns"}."""
    for record in found:
        values = record.values
        if not values.get("turns"):
            raise record.error("turns: must be a non-empty list of user messages")
        if str(values["turns"][0]).startswith(UNRESOLVED):
            raise record.error("a placeholder of SPEED-Bench, which is workload=speed_bench")
        line = {"category": record.text("category"), "turns": values["turns"]}
        yield record.place, {**line, "id": values.get("question_id")}


def _speed_bench(
    config: WorkloadConfig, found: Sequence[Record], read: Read
) -> Iterator[tuple[str, Line]]:
    """Lines of SPEED-Bench, whose rows are {"question_id", "category", "turns", …} as released and
    {…, "messages"} as the script that prepares it writes them; a message of a user is a turn."""
    conversations = [_turns_of(record) for record in found]
    unresolved = [
        record
        for record, turns in zip(found, conversations, strict=True)
        if any(turn.startswith(UNRESOLVED) for turn in turns)
    ]
    if unresolved:
        raise unresolved[0].error(
            f"the prompts of {len(unresolved)} of {len(found)} rows are placeholders, whose text "
            f"is with its sources; the file with all texts: {SOURCES['speed_bench']}"
        )
    categories = [record.text("category") for record in found]
    if config.category is not None and config.category not in categories:
        raise refusal(
            "workload.category",
            config.category,
            f"is that of no row in {config.path}",
            allowed=f"{', '.join(sorted(set(categories)))}, or null for all",
        )
    for record, turns, category in zip(found, conversations, categories, strict=True):
        if config.category in (None, category):
            values = record.values
            meta = {key: values[key] for key in OF_SPEED_BENCH if values.get(key) is not None}
            line = {"id": record.text("question_id"), "category": category, "turns": turns}
            yield record.place, {**line, "meta": meta}


def _turns_of(record: Record) -> list[str]:
    """The messages of the user in a row of SPEED-Bench."""
    values = record.values
    key = "turns" if values.get("turns") else "messages"
    given = values.get(key)
    if not isinstance(given, list) or not given:
        raise record.error("turns or messages: one must be a non-empty list of the user's messages")
    turns = []
    for i, each in enumerate(given):
        said = each
        if key == "messages" and isinstance(each, dict):
            said = each.get("content") if each.get("role") == "user" else None
        if not isinstance(said, str) or not said.strip():
            raise record.error(
                f"{key}[{i}]: {shown(each)} is not allowed; it must be a user's text"
            )
        turns.append(said)
    return turns


def _sharegpt(
    config: WorkloadConfig, found: Sequence[Record], read: Read
) -> Iterator[tuple[str, Line]]:
    """Lines of ShareGPT, whose entries are {"id", "conversations": [{"from", "value"}, …]}. Ids may
    repeat, so that they are kept in `meta`."""
    for record in found:
        system, turns, _ = _users_part(record)
        if turns:
            line = {"turns": turns[: config.max_turns], "meta": {"id": record.values.get("id")}}
            yield record.place, {**line, "system": system}


def _users_part(record: Record) -> tuple[str | None, list[str], bool]:
    """The system message or None, the users' messages up to an empty one, and whether an answer
    comes before all of them."""
    given = record.values.get("conversations")
    if not isinstance(given, list) or not all(isinstance(each, dict) for each in given):
        raise record.error('conversations: must be a list of {"from", "value"}')
    system: str | None = None
    turns: list[str] = []
    is_headless = False
    for i, message in enumerate(given):
        speaker, value = SPEAKERS.get(str(message.get("from"))), message.get("value")
        if speaker is None or not isinstance(value, str):
            raise record.error(
                f"conversations[{i}]: {shown(message)} is not allowed; from is one of "
                f"{', '.join(SPEAKERS)}, and value is a text"
            )
        if speaker == "system" and value.strip() and not turns:
            system = value
        elif speaker == "user" and not value.strip():
            break
        elif speaker == "user":
            turns.append(value)
        elif speaker == "assistant" and not turns:
            is_headless = True
    return system, turns, is_headless


# Functions that yield places, and lines as `workload=jsonl` has them; each raises WorkloadError,
# with the place, for a record that is in another format.
FORMATS = {
    "gsm8k": _gsm8k,
    "humaneval": _humaneval,
    "mt_bench": _questions,
    "spec_bench": _questions,
    "speed_bench": _speed_bench,
    "sharegpt": _sharegpt,
}
