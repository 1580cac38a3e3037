"""Targets with drafters for fuzzed engines: the trained zoo, and small random models of the
families and layouts that the zoo leaves out. Each is loaded once a process, dtype and device.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import block_worlds
import eagle_worlds
import numpy as np
import torch
from mtp_folders import agreeable
from scenarios import LetterTokenizer, random_prompt
from tiny_targets import assistant_config, gemma4_config, load, run_config, write_folder

from hydraspec.config.schema import Dtype, RunConfig, Weights
from hydraspec.engine.native import NativeEngine
from hydraspec.engine.run.loading import assemble
from hydraspec.graphs import GraphBackend
from hydraspec.models.base import TargetModel
from hydraspec.models.checkpoint.reader import resolve_folder
from hydraspec.models.tokenizer import load_tokenizer
from hydraspec.parallel.group import SOLO, TensorGroup
from hydraspec.speculators import registry
from hydraspec.types import Completion, Request, SamplingParams
from hydraspec.zoo.recipe.evaluate import read_workload

LONGEST_OUTPUT = 24
# Stops and limits cut an output; what follows is known too, for limits past the end of a text.
KNOWN_TOKENS = LONGEST_OUTPUT + 1
# Around the windows of 8 and 32, the blocks of 8 to 64, and longer than small steps.
PROMPT_LENGTHS = (1, 2, 7, 9, 16, 31, 33, 45, 64, 65, 90, 128)

RANDOM_GEMMAS: dict[str, dict[str, Any]] = {
    "sliding": {},
    "sharing": {
        "attention_k_eq_v": False,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2,
        "use_double_wide_mlp": True,
        "hidden_size_per_layer_input": 8,
    },
    "experts": {
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 16,
        "sliding_window": 5,
    },
}
MTP_KINDS = ("mimo", "deepseek")


@dataclass(frozen=True)
class Pair:
    """A target and a drafter, by name; methods that need no drafter's folder have None."""

    stage: str
    method: str
    drafter: str | None = None


ZOO_PAIRS = (
    Pair("tiny_gemma4", "none"),
    Pair("tiny_gemma4", "gemma4_mtp", "zoo:tiny_gemma4-assistant"),
    Pair("tiny_gemma4", "eagle3", "zoo:tiny_gemma4-eagle3"),
    Pair("tiny_gemma4", "peagle", "zoo:tiny_gemma4-peagle"),
    Pair("tiny_gemma4_e", "gemma4_mtp", "zoo:tiny_gemma4_e-assistant"),
    Pair("tiny_gemma4_moe", "gemma4_mtp", "zoo:tiny_gemma4_moe-assistant"),
    Pair("tiny_gemma4_unified", "gemma4_mtp", "zoo:tiny_gemma4_unified-assistant"),
    Pair("tiny_qwen3", "eagle3", "zoo:tiny_qwen3-eagle3"),
    Pair("tiny_qwen3", "peagle", "zoo:tiny_qwen3-peagle"),
    Pair("tiny_mistral", "eagle", "zoo:tiny_mistral-eagle"),
    Pair("tiny_ministral3", "eagle", "zoo:tiny_ministral3-eagle"),
    Pair("tiny_deepseek", "mtp"),
    Pair("tiny_qwen3", "dflash", "zoo:tiny_qwen3-dflash"),
    Pair("tiny_qwen3", "dspark", "zoo:tiny_qwen3-dspark"),
    Pair("tiny_gemma4", "dflash", "zoo:tiny_gemma4-dflash"),
    Pair("tiny_gemma4", "dspark", "zoo:tiny_gemma4-dspark"),
    Pair("tiny_qwen3", "dflash2", "zoo:tiny_qwen3-dflash2"),
    Pair("tiny_gemma4_images", "gemma4_mtp", "zoo:tiny_gemma4_images-assistant"),
    Pair("tiny_gemma4_images", "eagle3", "zoo:tiny_gemma4_images-eagle3"),
)
QUANTISED_PAIRS = (
    Pair("tiny_gemma4_fp8", "gemma4_mtp", "zoo:tiny_gemma4-assistant"),
    Pair("tiny_gemma4_fp8", "eagle3", "zoo:tiny_gemma4_fp8-eagle3"),
    Pair("tiny_gemma4_w4a16", "peagle", "zoo:tiny_gemma4-peagle"),
    Pair("tiny_gemma4_moe_fp8", "gemma4_mtp", "zoo:tiny_gemma4_moe-assistant"),
    Pair("tiny_qwen3_fp8", "eagle3", "zoo:tiny_qwen3-eagle3"),
    Pair("tiny_mistral_fp8", "eagle", "zoo:tiny_mistral_fp8-eagle"),
    Pair("tiny_deepseek_fp8", "mtp"),
    Pair("tiny_gemma4_w4a16", "dspark", "zoo:tiny_gemma4-dspark"),
)
# In blocks of 128, which divides neither of its widths: ranks cannot divide it.
RAGGED = Pair("tiny_gemma4_fp8_block", "gemma4_mtp", "zoo:tiny_gemma4-assistant")
RANDOM_PAIRS = (
    *(Pair(f"random {name}", "gemma4_mtp", "assistant") for name in RANDOM_GEMMAS),
    Pair("random eagle on llama", "eagle", "drafter"),
    Pair("random eagle3 on qwen3", "eagle3", "drafter"),
    Pair("random peagle on gemma4", "peagle", "drafter"),
    Pair("random dflash on qwen3", "dflash", "drafter"),
    Pair("random dspark on gemma4", "dspark", "drafter"),
    Pair("random mimo", "mtp"),
    Pair("random deepseek", "mtp"),
    Pair("random dflash2 on qwen3", "dflash2", "drafter"),
)
PAIRS = ZOO_PAIRS + RANDOM_PAIRS


@dataclass
class Stage:
    """A loaded target, prompts for it, and what it greedily says after each."""

    name: str
    checkpoint: str
    weights: Weights
    target: TargetModel
    tokenizer: Any
    dtype: Dtype
    prompts: list[tuple[int, ...]] = field(default_factory=list)

    @cached_property
    def continuations(self) -> dict[tuple[int, ...], list[int]]:
        """What a plain engine says after each prompt that is asked for: no drafter, no graphs, one
        request at a time, an ample cache; on the CPU."""
        return _Continuations(stage(self.name, self.dtype))

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        return self.target.eos_token_ids

    def drafter(self, pair: Pair) -> str | None:
        """The drafter's folder."""
        if pair.drafter is None or pair.drafter.startswith("zoo:"):
            return pair.drafter
        return str(Path(self.checkpoint).parent / pair.drafter)

    def config(self, pair: Pair, **fields: Any) -> RunConfig:
        """A configuration of the pair; a random assistant's weights are drawn, as its target's."""
        config = run_config(
            self.checkpoint,
            method=pair.method,
            drafter=self.drafter(pair),
            dtype=self.dtype,
            weights=self.weights,
            **fields,
        )
        if pair.drafter != "assistant":
            config.method.weights = Weights.checkpoint
        return config

    def engine(self, config: RunConfig, backend: GraphBackend | None = None) -> NativeEngine:
        """An engine over the target that is loaded, with its own drafter and cache."""
        speculator = registry.build_speculator(config)
        speculator.load(self.target)
        loaded = assemble(config, self.target, self.tokenizer, speculator, None, backend=backend)
        return NativeEngine(config, loaded)


@cache
def stage(name: str, dtype: Dtype, device: str = "cpu") -> Stage:
    """The target of that name."""
    return _zoo(name, dtype, device) if name.startswith("tiny_") else _random(name, dtype, device)


def of_rank(found: Stage, group: TensorGroup) -> Stage:
    """The stage with a rank's part of its target."""
    checkpoint, weights = found.checkpoint, found.weights
    return replace(found, target=_load(checkpoint, weights, found.dtype, "cpu", group))


def _load(
    checkpoint: str, weights: Weights, dtype: Dtype, device: str, group: TensorGroup = SOLO
) -> TargetModel:
    given = {"weights": weights.value, "device": torch.device(device), "group": group}
    return load(checkpoint, getattr(torch, dtype.value), seed=7, **given)


def _zoo(name: str, dtype: Dtype, device: str) -> Stage:
    checkpoint = f"zoo:{name}"
    tokenizer = load_tokenizer(resolve_folder(checkpoint))
    assert tokenizer is not None
    target = _load(checkpoint, Weights.checkpoint, dtype, device)
    found = Stage(name, checkpoint, Weights.checkpoint, target, tokenizer, dtype)
    texts = [tokenizer.encode_chat(line["messages"]) for line in read_workload()[:24]]
    found.prompts = [tuple(text) for text in texts[:6]]
    for number, length in enumerate(PROMPT_LENGTHS):
        joined = texts[6 + number] + texts[number]
        found.prompts.append(tuple((joined + joined)[:length]))
    return found


@cache
def _folder(name: str) -> Path:
    """Folders of a random target and its drafters; they go when the process ends."""
    held = tempfile.TemporaryDirectory()
    folder = Path(held.name)
    _held.append(held)
    flavour = name.removeprefix("random ")
    if flavour in RANDOM_GEMMAS:
        # Untied: with a tied head a random target mostly repeats its last token.
        config = gemma4_config(**RANDOM_GEMMAS[flavour], tie_word_embeddings=False)
        write_folder(folder / "target", config)
        write_folder(folder / "assistant", assistant_config(config))
    elif flavour in MTP_KINDS:
        agreeable(flavour, folder / "target", num_mtp=1, weight=1.0, seed=3)
    elif flavour in block_worlds.WORLDS:
        block_worlds.make_world(folder, flavour, num_prompts=5)
    else:
        eagle_worlds.make_world(folder, flavour, num_prompts=5)
    return folder


_held: list[tempfile.TemporaryDirectory[str]] = []


def _random(name: str, dtype: Dtype, device: str) -> Stage:
    checkpoint = str(_folder(name) / "target")
    is_written = name.removeprefix("random ") in MTP_KINDS
    weights = Weights.checkpoint if is_written else Weights.random
    target = _load(checkpoint, weights, dtype, device)
    found = Stage(name, checkpoint, weights, target, LetterTokenizer(), dtype)
    rng = np.random.default_rng(5)
    room = target.max_position_embeddings - KNOWN_TOKENS - 1
    lengths = [min(length, room) for length in PROMPT_LENGTHS]
    found.prompts = [random_prompt(rng, length, target.vocab_size) for length in lengths]
    return found


class _Continuations(dict[tuple[int, ...], list[int]]):
    """Made when they are asked for: most cases draw few of the prompts."""

    def __init__(self, found: Stage) -> None:
        super().__init__()
        self._found = found

    def __missing__(self, prompt: tuple[int, ...]) -> list[int]:
        found = self._found
        assert prompt in found.prompts
        config = run_config(
            found.checkpoint,
            dtype=found.dtype,
            weights=found.weights,
            max_num_seqs=1,
            block_size=16,
        )
        config.target.max_model_len = min(256, found.target.max_position_embeddings)
        sampling = SamplingParams(max_tokens=KNOWN_TOKENS, ignore_eos=True)
        request = Request(index=0, id="0", sampling=sampling, prompt_token_ids=list(prompt))
        for event in found.engine(config).run([request], concurrency=1):
            if isinstance(event, Completion):
                assert event.error is None
                self[prompt] = event.output_token_ids
        return self[prompt]


def expected_output(
    stage: Stage, prompt: tuple[int, ...], sampling: SamplingParams, room: int
) -> tuple[list[int], str]:
    """Greedy output and finish reason by definition: the shortest prefix that ends the request."""
    ends = set(sampling.stop_token_ids) | (set() if sampling.ignore_eos else {*stage.eos_token_ids})
    continuation = stage.continuations[prompt]
    for length in range(1, len(continuation) + 1):
        output = continuation[:length]
        if output[-1] in ends or _holds(stage, output, sampling.stop):
            return output, "stop"
        if length >= min(sampling.max_tokens, room):
            return output, "length"
    raise AssertionError("the known continuation is too short")


def _holds(stage: Stage, output: Sequence[int], stops: Sequence[str]) -> bool:
    if not stops:
        return False
    text = stage.tokenizer.decode(output)
    return any(stop in text for stop in stops)
