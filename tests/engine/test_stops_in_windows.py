"""Ends inside a draft window: end of sequence among drafts, stop strings over token borders.

The definition is `FinishCheck`'s, and the same on every path: an output ends at its first token
that is an ending one, or after which the text holds a stop string. Accepted tokens after it are
dropped. Graphs, ranks, pictures, grammars and samples are in test_stops_everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from itertools import product

import pytest
import torch
from grids import slow_unless
from window_ends import Whole, check_ends, decoded, whole

from hydraspec import factory
from hydraspec.cli.compose import plan
from hydraspec.engine.base import Engine
from hydraspec.engine.native import NativeEngine
from hydraspec.types import Request, SamplingParams
from hydraspec.zoo.recipe.evaluate import read_workload

PATHS = {  # overrides of each path
    "none": ["target=tiny_qwen3", "method=none"],
    "one step ahead": ["target=tiny_qwen3", "method=eagle3", "engine.async_scheduling=true"],
    "few blocks": ["target=tiny_qwen3", "method=eagle3", "engine.kv_cache.memory_gib=0.0012"],
    "small chunks": ["target=tiny_qwen3", "method=eagle3", "engine.max_num_batched_tokens=24"],
    "block verification": ["target=tiny_qwen3", "method=eagle3", "method.verification=block"],
    "eagle": ["target=tiny_mistral", "method=eagle"],
    "gemma4_mtp": ["target=tiny_gemma4", "method=gemma4_mtp"],
    "mtp": ["target=tiny_deepseek", "method=mtp"],
    "peagle": ["target=tiny_qwen3", "method=peagle"],
    "dflash": ["target=tiny_qwen3", "method=dflash"],
    "dflash2": ["target=tiny_qwen3", "method=dflash2"],
    "dspark": ["target=tiny_qwen3", "method=dspark"],
    "ngram": ["target=tiny_qwen3", "method=ngram"],
    "suffix": ["target=tiny_qwen3", "method=suffix"],
    "suffix ahead": ["target=tiny_qwen3", "method=suffix", "engine.async_scheduling=true"],
    "transformers": ["engine=transformers", "target=tiny_qwen3", "method=none"],
    "assisted": ["engine=transformers", "target=tiny_gemma4", "method=gemma4_mtp"],
}
# Other tests hold the stops of every drafter (test_stops_everywhere).
QUICK = ("none", "one step ahead", "few blocks", "small chunks", "gemma4_mtp", "dspark", "ngram")
QUICK += ("suffix", "assisted")
TEXT = (
    "Write a function sum_tiles that goes over tiles, adds 5 for each tile above 13 and sums them."
)
NUM_ANSWERS, LONGEST = 6, 64


@pytest.fixture(scope="module", autouse=True)
def _closed() -> Iterator[None]:
    yield
    engine_of.cache_clear()


@cache
def engine_of(*typed: str) -> Engine:
    torch.set_num_threads(1)
    given = ["target.dtype=float32", "cudagraph=none", "engine.max_num_seqs=6", *typed]
    return factory.build_engine(plan(given).jobs[0].config)


def target_of(path: str) -> str:
    return next(each for each in PATHS[path] if each.startswith("target="))


def asked() -> Request:
    messages = [{"role": "user", "content": TEXT}]
    return Request(index=0, id="0", sampling=SamplingParams(), messages=messages)


@cache
def said(target: str) -> Whole:
    """The target's tokens without any end."""
    return whole(engine_of(target, "method=none"), asked())


@pytest.mark.parametrize("path", slow_unless(lambda path: path in QUICK, product(PATHS)))
def test_outputs_end_where_the_whole_text_says(path: str) -> None:
    num_cut = check_ends(engine_of(*PATHS[path]), asked(), said(target_of(path)))
    assert num_cut > 0 or path in ("none", "transformers")


def answers(*, ignore_eos: bool) -> list[Request]:
    sampling = SamplingParams(max_tokens=LONGEST, ignore_eos=ignore_eos)
    return [
        Request(index=0, id="0", sampling=sampling, messages=line["messages"])
        for line in read_workload()[:NUM_ANSWERS]
    ]


@cache
def without_end(target: str) -> list[list[int]]:
    """The target's tokens after its ends of sequence, too."""
    found, _ = decoded(engine_of(target, "method=none"), answers(ignore_eos=True))
    return [completion.output_token_ids for completion in found]


@pytest.mark.parametrize(
    "path",
    slow_unless(
        lambda path: path in ("none", "one step ahead", "gemma4_mtp", "mtp", "ngram", "assisted"),
        [(path,) for path in PATHS if path != "few blocks"],
    ),
)
def test_the_first_end_of_sequence_ends_an_answer(path: str) -> None:
    """Also where it is an accepted draft, with a token after it."""
    plain = engine_of(target_of(path), "method=none")
    assert isinstance(plain, NativeEngine)
    ends = plain.parts.target.eos_token_ids
    times = 2 if "suffix" in path else 1  # it drafts the ends of finished answers
    found, num_cut = decoded(engine_of(*PATHS[path]), answers(ignore_eos=False) * times)
    places = set()
    for completion, tokens in zip(found, without_end(target_of(path)) * times, strict=True):
        end = next(place for place, token in enumerate(tokens) if token in ends)
        assert completion.output_token_ids == tokens[: end + 1]
        assert (completion.finish_reason, completion.ended_by_token) == ("stop", True)
        places.add(end % 4)
    assert len(places) > 2
    assert num_cut > 0 or path in ("none", "transformers", "ngram")  # no text of its own has an end
