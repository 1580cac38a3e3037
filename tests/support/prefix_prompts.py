"""A prompt, KV groups, and modelled engines that have answered some."""

from __future__ import annotations

from prefix_model import Model
from prefix_setting import VOCAB_SIZE, Setting

FULL, SLIDING, DRAFT = (16, None, 0), (16, 40, 0), (16, None, 1)


def served(
    groups: tuple[tuple[int, int | None, int], ...],
    *prompts: list[int],
    runs_ahead: bool = False,
    max_rows: int = 64,
) -> Model:
    """An engine that has answered the prompts one after another, two tokens each."""
    model = Model(
        Setting(
            groups=groups,
            num_blocks=(40,) * len(groups),
            num_drafts=1,
            max_num_seqs=4,
            max_rows=max_rows,
            max_len=300,
            runs_ahead=runs_ahead,
        )
    )
    for prompt in prompts:
        model.add(prompt, 2)
        while model.alive:
            model.step([0])
    return model


def hit(model: Model, tokens: list[int]) -> int:
    return model.kv.find_prefix(model.kv.keys_of(tokens), len(tokens) - 1)


PROMPT = [(place * place // 7 + place // 5) % VOCAB_SIZE for place in range(100)]


def starts(model: Model) -> list[int]:
    """Computed tokens with which requests were admitted, in order."""
    return [start for _, start in model.admissions]
