"""The parser of a verb's arguments, which raises mistakes as ConfigurationError."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from hydraspec.config.messages import nearest
from hydraspec.errors import ConfigurationError


class Parser(argparse.ArgumentParser):
    """Parser of `hydraspec <verb>`, without abbreviated flags; `options` are those of argparse.

    `parse_args` raises ConfigurationError with the flag that was meant.
    """

    def __init__(self, verb: str, **options: Any) -> None:
        super().__init__(prog=f"hydraspec {verb}", allow_abbrev=False, **options)

    @property
    def flags(self) -> list[str]:
        """All flags, short and long."""
        return [flag for action in self._actions for flag in action.option_strings]

    def error(self, message: str) -> NoReturn:
        """Raise ConfigurationError with the message, the usage and the nearest flag."""
        typed = [word for word in message.split() if word.startswith("-")]
        meant = nearest(typed[0], self.flags) if "unrecognized" in message and typed else None
        usage = " ".join(self.format_usage().split()).removeprefix("usage: ")
        remedy = f"did you mean {meant}?" if meant else f"see {self.prog} --help"
        raise ConfigurationError(f"{message}\n  allowed: {usage}\n  to do: {remedy}")
