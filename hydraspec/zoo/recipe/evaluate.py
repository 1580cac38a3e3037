"""A plain uncached evaluation of target and drafter, written from the definition.

It needs no engine: the target's greedy text comes from whole forwards over the growing text. Since
the target is causal, one more forward over the finished text gives the hidden state and KV of every
row as they were when the row was the last one, so each draft is made exactly as in decoding.

Counting follows the verifier: an accepted token counts also where a stop then cuts it, so the text
is continued K tokens past the stop.

Letters: B prompts, T target rows, K drafts, P rows of one prompt that may draft.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.progress import track
from torch import Tensor
from transformers import (
    Gemma4AssistantForCausalLM,
    Gemma4ForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from hydraspec.zoo.recipe.block_heads import BlockHead
from hydraspec.zoo.recipe.corpus import WORKLOAD_MAX_TOKENS, WORKLOAD_PATH, extract_answer
from hydraspec.zoo.recipe.draft_heads import DraftHead
from hydraspec.zoo.recipe.modeling import (
    causal_masks,
    draft_masks,
    run_draft_step,
    run_target,
    target_masks,
)
from hydraspec.zoo.recipe.train_block import block_draft_rows
from hydraspec.zoo.recipe.train_drafter import draft_rows


@dataclass
class Generation:
    """Greedy text of one prompt; `tokens` goes on past the stop, `end` is where the text ends."""

    tokens: list[int]
    prompt_length: int
    end: int  # index after the stop token, or after the last token the limit allows


# Drafts [P, K] of every row from the prompt's last to the text's last but one, for a text and K.
DraftRows = Callable[[Generation, int], Tensor]


@dataclass
class Counts:
    """Numbers of verify steps (`drafts`) and of drafts accepted at each position."""

    drafts: int = 0
    accepted: list[int] = field(default_factory=list)

    def add(self, num_accepted: int, num_drafts: int) -> None:
        self.accepted = self.accepted or [0] * num_drafts
        self.drafts += 1
        for i in range(num_accepted):
            self.accepted[i] += 1

    def summary(self) -> dict[str, Any]:
        """Acceptance figures as summary.json defines them, rounded to 3 digits."""
        drafts = max(self.drafts, 1)
        offered = [self.drafts, *self.accepted[:-1]]
        pairs = zip(self.accepted, offered, strict=True)
        return {
            "drafts": self.drafts,
            "acceptance_length": round(1 + sum(self.accepted) / drafts, 3),
            "acceptance_rate": round(sum(self.accepted) / drafts / len(self.accepted), 3),
            "per_position": [round(a / drafts, 3) for a in self.accepted],
            "conditional": [round(a / max(o, 1), 3) for a, o in pairs],
        }


def read_workload(path: Path = WORKLOAD_PATH) -> list[dict[str, Any]]:
    """The lines of a workload file, parsed."""
    return [json.loads(line) for line in path.read_text().splitlines()]


@torch.inference_mode()
def generate_greedy(
    target: PreTrainedModel,
    prompts: list[list[int]],
    limits: list[int],
    stops: set[int],
    extra: int,
) -> list[Generation]:
    """Uncached greedy continuations of prompts to a stop or limit, and `extra` tokens further."""
    device = target.device
    texts = [list(prompt) for prompt in prompts]
    ends: list[int | None] = [None] * len(prompts)
    for _ in track(range(max(limits) + extra), "greedy text", transient=True):
        active = [i for i, e in enumerate(ends) if e is None or len(texts[i]) < e + extra]
        if not active:
            break
        longest = max(len(texts[i]) for i in active)
        tokens = torch.tensor([texts[i] + [0] * (longest - len(texts[i])) for i in active])
        logits = run_target(target, tokens.to(device), target_masks(target, longest)).logits
        last = torch.tensor([len(texts[i]) - 1 for i in active], device=device)
        chosen = logits[torch.arange(len(active), device=device), last].argmax(-1).tolist()
        for i, token in zip(active, chosen, strict=True):
            texts[i].append(token)
            full = len(texts[i]) - len(prompts[i]) >= limits[i]
            if ends[i] is None and (token in stops or full):
                ends[i] = len(texts[i])
    pairs = zip(texts, prompts, ends, strict=True)
    return [Generation(text, len(prompt), end or len(text)) for text, prompt, end in pairs]


@torch.inference_mode()
def draft_all_rows(
    target: Gemma4ForCausalLM, assistant: Gemma4AssistantForCausalLM, text: Generation, k: int
) -> Tensor:
    """Drafts [P, K] of every row p from the prompt's last to the text's last but one."""
    device = target.device
    length, window = len(text.tokens), target.config.sliding_window
    tokens = torch.tensor([text.tokens], device=device)
    output = run_target(target, tokens, causal_masks(length, window, device))
    rows = torch.arange(text.prompt_length - 1, text.end - 1, device=device)[None]
    masks = draft_masks(rows, length, window)
    read, hidden = tokens[:, rows[0] + 1], output.hidden[:, rows[0]]
    drafts = []
    for _ in range(k):
        embedded = target.model.embed_tokens(read)
        state, hidden = run_draft_step(assistant, embedded, hidden, rows, output.kv, masks)
        head = assistant.masked_embedding
        weight = assistant.lm_head.weight
        read = (assistant.lm_head(state) if head is None else head(state, weight)).argmax(-1)
        drafts.append(read[0])
    return torch.stack(drafts, dim=-1).cpu()


def by_assistant(target: Gemma4ForCausalLM, assistant: Gemma4AssistantForCausalLM) -> DraftRows:
    """A function that drafts with a Gemma 4 assistant."""
    return lambda text, k: draft_all_rows(target, assistant, text, k)


def by_head(target: PreTrainedModel, head: DraftHead, aux_layer_ids: tuple[int, ...]) -> DraftRows:
    """A function that drafts with a head that has its own KV."""
    return _by_rows(target, lambda tokens, k: draft_rows(target, head, tokens, aux_layer_ids, k))


def by_block(target: PreTrainedModel, head: BlockHead, aux_layer_ids: tuple[int, ...]) -> DraftRows:
    """A function that drafts with a block drafter."""
    return _by_rows(
        target, lambda tokens, k: block_draft_rows(target, head, tokens, aux_layer_ids, k)
    )


def _by_rows(target: PreTrainedModel, draft: Callable[[Tensor, int], Tensor]) -> DraftRows:
    """A function that takes the answers' rows of what `draft` gives for whole texts [1, T]."""

    def rows(text: Generation, k: int) -> Tensor:
        tokens = torch.tensor([text.tokens], device=target.device)
        return draft(tokens, k)[0][text.prompt_length - 1 : text.end - 1].cpu()

    return rows


def count_drafts(text: Generation, drafts: Tensor) -> list[int]:
    """Accepted drafts of every verify step, in order."""
    counts, row = [], text.prompt_length - 1
    while row + 2 < text.end:  # token row+1 is known and is not the last
        proposed = drafts[row - (text.prompt_length - 1)].tolist()
        truth = text.tokens[row + 2 : row + 2 + len(proposed)]
        accepted = 0
        while accepted < len(proposed) and proposed[accepted] == truth[accepted]:
            accepted += 1
        counts.append(accepted)
        row += accepted + 1
    return counts


def evaluate(
    target: PreTrainedModel,
    drafters: dict[str, DraftRows],
    tokenizer: PreTrainedTokenizerFast,
    *,
    k: int = 3,
    workload: list[dict[str, Any]] | None = None,
) -> dict[str, Any]:
    """Exact match, output length and acceptance over a workload, overall and by category."""
    lines = workload if workload is not None else read_workload()
    prompts = [
        tokenizer.apply_chat_template(
            line["messages"], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        for line in lines
    ]
    stop_ids = target.generation_config.eos_token_id
    stops = set(stop_ids if isinstance(stop_ids, list) else [stop_ids])
    texts = generate_greedy(target, prompts, [WORKLOAD_MAX_TOKENS] * len(lines), stops, k + 1)
    correct: dict[str, list[bool]] = defaultdict(list)
    counts: dict[str, dict[str, Counts]] = {name: defaultdict(Counts) for name in drafters}
    for line, text in zip(lines, texts, strict=True):
        output = text.tokens[text.prompt_length : text.end]
        said = tokenizer.decode(output, skip_special_tokens=True)
        correct[line["category"]].append(extract_answer(said) == line["answer"])
        for name, drafter in drafters.items():
            for accepted in count_drafts(text, drafter(text, k)):
                counts[name]["all"].add(accepted, k)
                counts[name][line["category"]].add(accepted, k)
    lengths = [text.end - text.prompt_length for text in texts]
    return {
        "mean_output_tokens": round(sum(lengths) / len(lengths), 2),
        "exact_match": {c: round(sum(v) / len(v), 3) for c, v in correct.items()},
        "acceptance": {
            name: {c: v.summary() for c, v in of.items()} for name, of in counts.items()
        },
    }
