"""Messages of a workload line: roles, and content as text or as parts of text and pictures."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeAlias

from hydraspec.types import Picture

SPEAKERS = ("user", "assistant")  # these alternate
PART_KEYS = {"text": {"type", "text"}, "image": {"type", "image"}}
MESSAGE = '{"role": "user", "content": "..."}, both strings (or a list of parts as content)'
PARTS = '{"type": "text", "text": "..."} and {"type": "image", "image": "<path or data URL>"}'

Refuse: TypeAlias = Callable[[str, object, str], NoReturn]  # key, value, what is allowed
Read: TypeAlias = Callable[[str], Picture]  # returns the picture of a path or data URL


def parse_messages(
    value: object, refuse: Refuse, read: Read
) -> tuple[list[dict[str, Any]], tuple[Picture, ...]]:
    """The messages, and the pictures of their parts in order, which the parts then lack."""
    if not isinstance(value, list) or not value:
        refuse("messages", value, f"a non-empty list of {MESSAGE}")
    messages: list[dict[str, Any]] = []
    pictures: list[Picture] = []
    for i, message in enumerate(value):
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            refuse("messages", message, f"a non-empty list of {MESSAGE}")
        role, content = message["role"], message["content"]
        if isinstance(content, list) and content and isinstance(role, str) and role:
            content, found = _parts(f"messages[{i}].content", role, content, refuse, read)
            pictures += found
        elif not all(isinstance(part, str) and part for part in (role, content)):
            refuse("messages", message, f"a non-empty list of {MESSAGE}")
        messages.append({"role": role, "content": content})
    return messages, tuple(pictures)


def _parts(
    key: str, role: str, parts: Sequence[object], refuse: Refuse, read: Read
) -> tuple[list[dict[str, str]], list[Picture]]:
    found: list[dict[str, str]] = []
    pictures: list[Picture] = []
    for i, part in enumerate(parts):
        kind = part.get("type") if isinstance(part, dict) else None
        known = PART_KEYS.get(kind) if isinstance(kind, str) else None
        if not isinstance(part, dict) or known is None:
            refuse(f"{key}[{i}]", part, f"{PARTS}; audio, video and other parts are not read")
        if set(part) != known or not isinstance(part[kind], str):
            refuse(f"{key}[{i}]", part, f"{PARTS}, each with these keys and strings alone")
        if kind == "text":
            if not part["text"].strip():
                refuse(f"{key}[{i}].text", part["text"], "a string with something in it")
            found.append(part)
            continue
        if role != "user":
            refuse(f"{key}[{i}]", part, f"text, as the message's role is {role!r}, not 'user'")
        found.append({"type": "image"})
        pictures.append(read(part["image"]))
    return found, pictures


def check_order(roles: Sequence[str], fail: Callable[[str], NoReturn]) -> None:
    """Refuse roles unless the user speaks first, user and assistant alternate, and the last message
    is not the assistant's."""
    for i in range(1, len(roles)):
        if roles[i] in SPEAKERS and roles[i] == roles[i - 1]:
            fail(
                f"messages[{i}]: role {roles[i]!r} comes twice in a row; user and assistant "
                "alternate: join the two messages, or add what was said between them"
            )
    if next((role for role in roles if role in SPEAKERS), None) == "assistant":
        fail(f"messages[{roles.index('assistant')}]: the user speaks before the assistant")
    if roles[-1] == "assistant":
        fail(
            f"messages[{len(roles) - 1}]: the last message is the assistant's, and nothing is "
            'asked after it; leave it out, or give it as "answer"'
        )
