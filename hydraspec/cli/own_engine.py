"""The engine that Python code of users gets: it checks calls, with one message for each mistake,
and logs the engine's notes.

Runs of the command line use the engine without these checks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from hydraspec import factory
from hydraspec.engine.base import Engine
from hydraspec.errors import ConfigurationError


class OwnEngine:
    """Engine that checks calls and passes them to the engine in it, until it is closed."""

    def __init__(self, engine: Engine) -> None:
        self._engine: Engine | None = engine
        factory.log_notes(engine)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._open(name), name)

    def run(self, requests: Sequence[Any], *, concurrency: int | None) -> Iterator[Any]:
        """Run tokenised requests as Engine.run does; yields step records and completions.

        Raises:
            ConfigurationError: the engine is closed, or a request has no token ids.
        """
        engine = self._open("run")
        for request in requests:
            if request.prompt_token_ids is None:
                raise _mistake(
                    "run", f"request {request.id!r} has no token ids", "call engine.tokenize first"
                )
        return _with_notes(engine, engine.run(requests, concurrency=concurrency))

    def cancel(self, index: int) -> None:
        """Cancel the request with this index, as Engine.cancel does.

        Raises:
            ConfigurationError: the engine is closed or cannot cancel, or `index` is no index.
        """
        engine = self._open("cancel")
        if isinstance(index, bool) or not isinstance(index, int) or index < 0:
            raise _mistake("cancel", f"{index!r} is no number of a request", "give Request.index")
        engine.cancel(index)

    def baseline(self) -> OwnEngine:
        """The same target without a drafter, as from Engine.baseline, with checked calls too."""
        return OwnEngine(self._open("baseline").baseline())

    def close(self) -> None:
        """Close the engine; a second call has no effect."""
        engine, self._engine = self._engine, None
        if engine is not None:
            factory.log_notes(engine)
            engine.close()

    def _open(self, call: str) -> Engine:
        if self._engine is None:
            raise _mistake(call, "the engine is closed", "call hydraspec.build_engine for another")
        return self._engine


Engine.register(OwnEngine)


def _with_notes(engine: Engine, events: Iterator[Any]) -> Iterator[Any]:
    """The events of a run; then logs the notes that it added."""
    yield from events
    factory.log_notes(engine)


def _mistake(call: str, problem: str, remedy: str) -> ConfigurationError:
    allowed = "an engine that is open, tokenized requests, and the indices of requests"
    return ConfigurationError(f"engine.{call}: {problem}\n  allowed: {allowed}\n  to do: {remedy}")
