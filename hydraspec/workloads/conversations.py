"""workload=multi_turn: single prompts as turns of conversations."""

from __future__ import annotations

from dataclasses import replace

from hydraspec.config.messages import refusal
from hydraspec.config.schema import RunConfig
from hydraspec.types import Request, WorkloadError


def num_turns_in_all(config: RunConfig) -> int:
    """Number of requests of workload=multi_turn, which are the turns of all conversations."""
    size = config.workload
    return size.num_turns * min(size.limit or size.num_conversations, size.num_conversations)


def in_conversations(requests: list[Request], num_turns: int) -> list[Request]:
    """The requests as turns: each `num_turns` consecutive requests are a conversation. Ids are
    "<conversation>/<n>", conversations from 0, n from 1."""
    return [
        replace(
            request,
            id=f"{place // num_turns}/{place % num_turns + 1}",
            after=requests[place - 1].index if place % num_turns else None,
            turn=place % num_turns + 1,
        )
        for place, request in enumerate(requests)
    ]


def conversations_of_lines(
    requests: list[Request], places: dict[str, str], config: RunConfig
) -> tuple[list[Request], dict[str, str]]:
    """The lines of a file as turns of workload=multi_turn, and the place of each turn by its id.

    Raises:
        ConfigurationError: the file has fewer lines than there are turns.
        WorkloadError: a line is no single message of a user.
    """
    size, found, needed = config.workload, len(requests), num_turns_in_all(config)
    if found < needed:
        raise refusal(
            "workload.num_conversations",
            size.num_conversations,
            f"and workload.num_turns={size.num_turns} need {needed} lines, and {size.path} has "
            f"{found}",
            allowed=f"{found} turns together",
            remedy="lower one of them, or give workload.path=null for random token ids",
        )
    for request in requests:
        roles = [message["role"] for message in request.messages or ()]
        if roles != ["user"] or request.turn > 1:
            raise WorkloadError(
                f"{places[request.id]}: workload=multi_turn makes turns of lines whose "
                '"messages" hold one message of a user; choose workload=jsonl for a file of '
                'conversations ("turns")'
            )
    turns = in_conversations(requests, size.num_turns)
    before = [places[request.id] for request in requests]
    return turns, {turn.id: place for turn, place in zip(turns, before, strict=True)}
