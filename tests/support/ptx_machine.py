"""Runs the PTX of messages between ranks on a CPU, a memory access at a time.

Just the instructions that `hydraspec_kernels.collectives.messages_kernel` has. Memory is words of
32 bits by address, shared by all ranks; `run` is a generator that stops before every access, so
that a test chooses whose comes next.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

Memory = dict[int, int]
ONES = (1 << 32) - 1
COMPARE: dict[str, Callable[[int, int], bool]] = {
    "eq": operator.eq,
    "ne": operator.ne,
    "lt": operator.lt,
}
COMPUTE: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "and": operator.and_,
    "or": operator.or_,
    "max": max,
}


def run(text: str, operands: Mapping[int, int], memory: Memory, clock: Iterator[int]) -> Any:
    """A generator that yields before every access, and returns the registers by name: operands are
    $0, $1, … Numbers are unsigned, as wide as their instruction says.
    """
    lines = [line.strip() for line in re.split(r"[;\n]", _without_braces(text))]
    code = [line for line in lines if line and not line.startswith(".reg")]
    labels = {line[:-1]: place for place, line in enumerate(code) if line.endswith(":")}
    registers: dict[str, int] = {f"${number}": value for number, value in operands.items()}
    place = 0
    while place < len(code):
        line = code[place]
        place += 1
        if line.endswith(":"):
            continue
        guard = re.match(r"@(!?)(\w+)\s+(.*)", line)
        if guard:
            negated, name, line = guard.groups()
            if bool(registers[name]) == bool(negated):
                continue
        operation, _, rest = line.partition(" ")
        arguments = [part.strip() for part in rest.split(",")]
        if operation == "bra":
            place = labels[arguments[0]]
            continue
        if operation.startswith(("ld", "st")):
            yield
            _access(operation, rest, registers, memory)
            continue
        _compute(operation, arguments, registers, clock)
    return registers


def _without_braces(text: str) -> str:
    """Vectors as {a, b} become <a b>; the block's own braces go."""
    text = re.sub(r"\{((?:\w+, )*\w+)\}", lambda m: "<" + m[1].replace(", ", " ") + ">", text)
    return text.replace("{", "").replace("}", "")


def _value(text: str, registers: Mapping[str, int], bits: int) -> int:
    known = registers[text] if text in registers else int(text, 0)
    return known & ((1 << bits) - 1)


def _compute(
    operation: str, arguments: list[str], registers: dict[str, int], clock: Iterator[int]
) -> None:
    kind, *_, width = operation.split(".")
    bits = int(width[1:])
    target, *sources = arguments
    if sources == ["%globaltimer"]:
        registers[target] = next(clock)
        return
    if kind == "selp":
        chosen = sources[0] if registers[sources[2]] else sources[1]
        registers[target] = _value(chosen, registers, bits)
        return
    values = [_value(source, registers, bits) for source in sources]
    if kind == "mov":
        registers[target] = values[0]
    elif kind == "setp":
        registers[target] = COMPARE[operation.split(".")[1]](*values)
    else:
        registers[target] = COMPUTE[kind](*values) & ((1 << bits) - 1)


def _access(operation: str, rest: str, registers: dict[str, int], memory: Memory) -> None:
    place = re.search(r"\[([^\]+]+)(?:\+(\d+))?\]", rest)
    assert place is not None, rest
    at = registers[place[1].strip()] + int(place[2] or 0)
    others = (rest[: place.start()] + rest[place.end() :]).strip(" ,<>").split()
    if ".b64" in operation:
        assert len(others) == 1
        if operation.startswith("ld"):
            registers[others[0]] = memory[at] | memory[at + 4] << 32
        else:
            value = registers[others[0]]
            memory[at], memory[at + 4] = value & ONES, value >> 32
        return
    assert ".v4.b32" in operation
    for index, name in enumerate(others):
        if operation.startswith("ld"):
            registers[name] = memory[at + 4 * index]
        else:
            memory[at + 4 * index] = _value(name, registers, 32)
