"""Messages of a workload line: roles, and content as text or as parts of text and pictures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TypeAlias

from hydraspec.types import IMAGE, Picture

TEXT = "text"  # as IMAGE: a part's type, and its other key
SPEAKERS = ("user", "assistant")  # these alternate
MAX_TYPE = 40  # characters of a part's type in a message
MESSAGE = '{"role": "user", "content": "..."}, both strings (or a list of parts as content)'
PARTS = '{"type": "text", "text": "..."} and {"type": "image", "image": "<path or data URL>"}'

Refuse: TypeAlias = Callable[[str, object, str], NoReturn]  # key, value, what is allowed
Read: TypeAlias = Callable[[str], Picture]  # returns the picture of a path or data URL


def parse_messages(
    value: object, refuse: Refuse, read: Read
) -> tuple[list[dict[str, Any]], tuple[Picture, ...]]:
    """The messages, and the pictures of their parts in order, which the parts then lack. A part
    that is neither text nor a picture that can be read is a picture with an error, its request's.
    """
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
        if not isinstance(part, dict) or not isinstance(kind, str):
            refuse(f"{key}[{i}]", part, PARTS)
        if kind != TEXT:
            fault = _fault(kind, role, part)
            name = f"{key}[{i}]"
            pictures.append(Picture(name=name, error=fault) if fault else read(part[IMAGE]))
            found.append({"type": IMAGE})
            continue
        if set(part) != {"type", TEXT} or not isinstance(part[TEXT], str):
            refuse(f"{key}[{i}]", part, f"{PARTS}, each with these keys and strings alone")
        if not part[TEXT].strip():
            refuse(f"{key}[{i}].text", part[TEXT], "a string with something in it")
        found.append(part)
    return found, pictures


def _fault(kind: str, role: str, part: Mapping[str, object]) -> str | None:
    """The reason why a part that is no text cannot be read."""
    if kind != IMAGE:
        named = kind if len(kind) <= MAX_TYPE else kind[: MAX_TYPE - 3] + "..."
        return f"a part of type {named!r} is not read; give {PARTS}"
    if set(part) != {"type", IMAGE} or not isinstance(part[IMAGE], str):
        return f"it has other keys, or no string; give {PARTS}, each with these keys alone"
    if role != "user":
        return f"the message's role is {role!r}; show pictures in messages of 'user' alone"
    return None


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
