"""Tokens per second of the native engine against transformers, on the CPU, in one process.

    python tests/bench/transformers_on_cpu.py [--target tiny_gemma4] [--prompts 16] [--repeats 3]

Plain decoding is compared at batch 1 and 8, assisted decoding at batch 1 with the same assistant,
the same constant K and confidence threshold 0. Both sides decode the same prompts greedily for the
same number of tokens (no stopping) on the same number of threads; prefill is measured by itself and
taken off. Repeats are interleaved and the medians are printed, because a shared CPU drifts.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent / "support"))

import torch
from rich.console import Console
from rich.table import Table
from tiny_targets import run_config
from transformers import AutoTokenizer, Gemma4AssistantForCausalLM, Gemma4ForCausalLM

from hydraspec.config.schema import Dtype, Weights
from hydraspec.engine.native import NativeEngine
from hydraspec.models.checkpoint.reader import resolve_folder
from hydraspec.types import Request, SamplingParams, StepRecord
from hydraspec.zoo.recipe.evaluate import read_workload

NUM_TOKENS = 48


class Transformers:
    """generate() on the checkpoint's own files, in float32."""

    def __init__(self, target: str) -> None:
        self.model = Gemma4ForCausalLM.from_pretrained(
            resolve_folder(f"zoo:{target}"), dtype=torch.float32
        ).eval()
        self.assistant = Gemma4AssistantForCausalLM.from_pretrained(
            resolve_folder(f"zoo:{target}-assistant"), dtype=torch.float32
        ).eval()
        self.rows_per_forward: list[int] = []
        self.model.model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module: object, args: object, kwargs: dict[str, torch.Tensor]) -> None:
        tokens = kwargs.get("input_ids")
        tokens = kwargs["inputs_embeds"] if tokens is None else tokens
        self.rows_per_forward.append(tokens.shape[1])

    @torch.inference_mode()
    def plain(self, prompts: list[list[int]], num_tokens: int) -> None:
        longest = max(len(prompt) for prompt in prompts)
        ids = torch.tensor([[0] * (longest - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor(
            [[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts]
        )
        out = self.model.generate(
            ids,
            attention_mask=mask,
            do_sample=False,
            max_new_tokens=num_tokens,
            min_new_tokens=num_tokens,
        )
        assert out.shape[1] == longest + num_tokens

    @torch.inference_mode()
    def assisted(self, prompts: list[list[int]], num_tokens: int, k: int) -> None:
        settings = self.assistant.generation_config
        settings.num_assistant_tokens = k
        settings.num_assistant_tokens_schedule = "constant"
        settings.assistant_confidence_threshold = 0.0
        for prompt in prompts:
            ids = torch.tensor([prompt])
            self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
                assistant_model=self.assistant,
            )


def native_engine(target: str, method: str, k: int, batch: int) -> NativeEngine:
    return NativeEngine(
        run_config(
            f"zoo:{target}",
            method=method,
            drafter=f"zoo:{target}-assistant",
            k=k,
            dtype=Dtype.float32,
            weights=Weights.checkpoint,
            max_num_seqs=batch,
            max_num_batched_tokens=2048,
            block_size=16,
        )
    )


def run_native(
    engine: NativeEngine, prompts: list[list[int]], num_tokens: int, batch: int
) -> float:
    """Decode; returns the acceptance length, 1 where nothing was drafted."""
    requests = [
        Request(
            index=index,
            id=str(index),
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_tokens=num_tokens, ignore_eos=True),
        )
        for index, prompt in enumerate(prompts)
    ]
    drafts = accepted = 0
    for event in engine.run(requests, concurrency=batch):
        if isinstance(event, StepRecord):
            parts = [part for part in event.requests if part.draft_token_ids]
            drafts += len(parts)
            accepted += sum(part.num_accepted for part in parts)
    return 1 + accepted / drafts if drafts else 1.0


def seconds(function: Callable[[], object]) -> float:
    begin = time.perf_counter()
    function()
    return time.perf_counter() - begin


def decode_seconds(run: Callable[[int], object]) -> float:
    """Time of NUM_TOKENS tokens less that of one: decoding without prefill."""
    return seconds(lambda: run(NUM_TOKENS)) - seconds(lambda: run(1))


def batches(prompts: list[list[int]], size: int) -> list[list[list[int]]]:
    return [prompts[start : start + size] for start in range(0, len(prompts), size)]


def compare(
    label: str,
    ours: Callable[[int], object],
    theirs: Callable[[int], object],
    tokens: int,
    repeats: int,
) -> list[str]:
    ours(2)
    theirs(2)
    pairs = [(decode_seconds(ours), decode_seconds(theirs)) for _ in range(repeats)]
    native, other = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(b / a for a, b in pairs)
    return [label, f"{tokens / native:,.0f}", f"{tokens / other:,.0f}", f"{ratio:.2f}x"]


def chat_prompts(target: str, count: int) -> list[list[int]]:
    tokenizer = AutoTokenizer.from_pretrained(resolve_folder(f"zoo:{target}"))
    return [
        tokenizer.apply_chat_template(
            line["messages"], add_generation_prompt=True, tokenize=True, return_dict=False
        )
        for line in read_workload()[:count]
    ]


def plain_row(theirs: Transformers, prompts: list[list[int]], batch: int, args: Args) -> list[str]:
    engine = native_engine(args.target, "none", 0, batch)
    torch.set_num_threads(args.threads)
    groups = batches(prompts, batch)
    return compare(
        f"none, batch {batch}",
        lambda n: [run_native(engine, group, n, batch) for group in groups],
        lambda n: [theirs.plain(group, n) for group in groups],
        len(prompts) * (NUM_TOKENS - 1),
        args.repeats,
    )


def assisted_row(theirs: Transformers, prompts: list[list[int]], args: Args) -> list[str]:
    engine = native_engine(args.target, "gemma4_mtp", args.k, 1)
    torch.set_num_threads(args.threads)
    row = compare(
        f"gemma4_mtp K={args.k}, batch 1",
        lambda n: run_native(engine, prompts, n, 1),
        lambda n: theirs.assisted(prompts, n, args.k),
        len(prompts) * (NUM_TOKENS - 1),
        args.repeats,
    )
    theirs.rows_per_forward.clear()
    theirs.assisted(prompts, NUM_TOKENS, args.k)
    num_verified = sum(1 < rows <= args.k + 1 for rows in theirs.rows_per_forward)
    length = len(prompts) * (NUM_TOKENS - 1) / num_verified
    ours = run_native(engine, prompts, NUM_TOKENS, 1)
    return [*row, f"{ours:.2f} and {length:.2f}"]


class Args(argparse.Namespace):
    target: str
    prompts: int
    repeats: int
    k: int
    threads: int


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--target", default="tiny_gemma4")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--k", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args(namespace=Args())
    prompts = chat_prompts(args.target, args.prompts)
    theirs = Transformers(args.target)
    table = Table(
        title=f"{args.target}, float32, {args.threads} thread(s), decode tokens per second"
    )
    for column in ("", "native", "transformers", "ratio", "acceptance lengths"):
        table.add_column(column, justify="left" if not column else "right")
    table.add_row(*plain_row(theirs, prompts, 1, args))
    table.add_row(*plain_row(theirs, prompts, 8, args))
    table.add_row(*assisted_row(theirs, prompts, args))
    Console().print(table)


if __name__ == "__main__":
    main()
