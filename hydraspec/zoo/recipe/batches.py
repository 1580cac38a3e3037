"""Training sequences as one tensor: generated in parallel, tokenised, right-padded.

Letters: N examples, B batch, T `SEQUENCE_LENGTH`.
"""

from __future__ import annotations

import itertools
import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from hydraspec.zoo.recipe.corpus import training_examples
from hydraspec.zoo.recipe.recipes import SEQUENCE_LENGTH
from hydraspec.zoo.recipe.tokenizer import encode

SHARD_SIZE = 5000
SEED_STRIDE = 100_000  # shard i of data seed s draws from seed s * SEED_STRIDE + i


@dataclass(frozen=True)
class Sequences:
    """Rendered conversations; everything from `length` on is padding."""

    tokens: Tensor  # [N, T] int16
    prompt_length: Tensor  # [N] int32
    length: Tensor  # [N] int32
    index: Tensor  # [N] int64: place of each sequence in the whole set

    def to(self, device: torch.device) -> Sequences:
        """The same sequences on another device."""
        fields = (self.tokens, self.prompt_length, self.length, self.index)
        return Sequences(*(field.to(device) for field in fields))

    def rows(self, rows: Tensor) -> Sequences:
        """The sequences at places `rows` [B], tokens as int64."""
        kept = (self.prompt_length[rows], self.length[rows], self.index[rows])
        return Sequences(self.tokens[rows].long(), *kept)

    def copy_(self, other: Sequences) -> None:
        """Overwrite the tensors in place with those of `other`, as a captured CUDA graph needs."""
        self.tokens.copy_(other.tokens)
        self.prompt_length.copy_(other.prompt_length)
        self.length.copy_(other.length)
        self.index.copy_(other.index)

    def sample(self, batch_size: int, generator: torch.Generator) -> Sequences:
        """A batch drawn with replacement, tokens as int64."""
        device = self.tokens.device
        rows = torch.randint(len(self.tokens), (batch_size,), generator=generator, device=device)
        return self.rows(rows)


def _shard(job: tuple[Path, int, int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    folder, seed, count = job
    tokenizer = PreTrainedTokenizerFast.from_pretrained(str(folder))
    tokens = np.zeros((count, SEQUENCE_LENGTH), np.int16)
    prompt_length, length = np.zeros(count, np.int32), np.zeros(count, np.int32)
    for i, example in enumerate(itertools.islice(training_examples(seed), count)):
        prompt, response = encode(tokenizer, example)
        ids = [*prompt, *response]
        tokens[i, : len(ids)] = ids
        prompt_length[i], length[i] = len(prompt), len(ids)
    return tokens, prompt_length, length


def generate_sequences(
    tokenizer_folder: Path, count: int, seed: int, workers: int | None = None
) -> Sequences:
    """`count` training sequences; the same for the same seed whatever the number of workers."""
    starts = range(0, count, SHARD_SIZE)
    jobs = [
        (tokenizer_folder, seed * SEED_STRIDE + i, min(SHARD_SIZE, count - start))
        for i, start in enumerate(starts)
    ]
    workers = min(workers or os.cpu_count() or 1, len(jobs))
    if workers == 1:
        shards = list(map(_shard, jobs))
    else:
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            shards = list(pool.map(_shard, jobs))
    parts = (np.concatenate(arrays) for arrays in zip(*shards, strict=True))
    tokens, prompt_length, length = (torch.from_numpy(array) for array in parts)
    return Sequences(tokens, prompt_length, length, torch.arange(count))
