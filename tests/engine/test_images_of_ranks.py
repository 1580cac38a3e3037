"""Prompts with images on several ranks: the same tokens, drafts and accepted counts as one process,
and every rank that embeds tokens encodes each image once.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
from image_worlds import (
    FLAVOURS,
    draw_prompts,
    make_world,
    request_of,
    wrapper_config,
)
from scenarios import seeded
from side_by_side import assert_same_run, run_alone
from staged import assert_same_everywhere, run_over
from thread_ranks import as_ranks
from tiny_targets import assistant_config, run_config, write_folder

from hydraspec.config.schema import RunConfig, Weights
from hydraspec.engine.native import NativeEngine
from hydraspec.parallel.layout import Layout
from hydraspec.parallel.ranks import Ranks
from hydraspec.types import Request, SamplingParams

LAYERS = ["sliding_attention", "full_attention"] * 3
LAYOUTS = {
    "tp2": Layout(tensor=2),
    "pp2": Layout(pipeline=2),
    "tp2_pp2": Layout(tensor=2, pipeline=2),
}


def settings_of(folder: Path | str, **changes: Any) -> RunConfig:
    given = {"max_num_seqs": 3, "max_num_batched_tokens": 14, "max_model_len": 90, "seed": 7}
    return run_config(folder, **(given | changes))


def requests_of(prompts: list[Any]) -> list[Request]:
    sampling = SamplingParams(max_tokens=8, ignore_eos=True)
    return [request_of(prompt, i, sampling) for i, prompt in enumerate(prompts)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FLAVOURS)
def test_ranks_give_what_one_process_gives(name: str, layout: str, tmp_path: Path) -> None:
    """With an assistant; in pipelines per-layer inputs of later stages read the images too."""
    config = wrapper_config(name, num_hidden_layers=6, layer_types=LAYERS, num_kv_shared_layers=0)
    folder = write_folder(tmp_path / "target", config)
    own = {"model_type": "gemma4_unified_assistant"} if name == "12B" else {}
    drafter = write_folder(tmp_path / "own", assistant_config(config["text_config"], **own))
    settings = settings_of(folder, method="gemma4_mtp", drafter=drafter, k=3)
    requests = requests_of(draw_prompts(seeded(3), config, 5))
    alone = run_alone(NativeEngine(copy.deepcopy(settings)), requests)
    found = assert_same_everywhere(run_over(LAYOUTS[layout], settings, requests))
    assert_same_run(found, alone)


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("eagle3 reads images", "tp2"),
        ("eagle3 reads images", "pp2"),
        ("peagle reads images", "tp2"),  # its layers share KV: they are no two stages
        ("dflash", "tp2"),
        ("dflash", "pp2"),
    ],
)
def test_drafters_of_ranks_read_images(name: str, layout: str, tmp_path: Path) -> None:
    world: Any = make_world(tmp_path, name, num_prompts=4)
    settings = settings_of(world.folder, method=world.method, drafter=world.drafter, k=3)
    settings.method.weights = Weights.checkpoint
    requests = requests_of(list(world.prompts.values()))
    alone = run_alone(NativeEngine(copy.deepcopy(settings)), requests)
    found = assert_same_everywhere(run_over(LAYOUTS[layout], settings, requests))
    assert_same_run(found, alone)


def test_stages_that_embed_no_tokens_encode_nothing(tmp_path: Path) -> None:
    config = wrapper_config("31B", num_hidden_layers=6, layer_types=LAYERS)
    folder = write_folder(tmp_path, config)
    requests = requests_of(draw_prompts(seeded(3), config, 5))

    def work(ranks: Ranks) -> tuple[int, int]:
        engine = NativeEngine(settings_of(folder))
        run_alone(engine, requests)
        store, target = engine.parts.runner.images, engine.parts.target
        held = sum(
            weight.nbytes
            for name, weight in target.tensors().items()  # type: ignore[attr-defined]
            if "vision" in name and getattr(weight, "device", None) is not None
            if weight.device.type != "meta"
        )
        return store.num_encoded, held

    (first, held), (last, not_held) = as_ranks(Layout(pipeline=2), work)
    digests = {span.digest for request in requests for span in request.spans}
    assert (first, last) == (len(digests), 0)
    assert held > 0 == not_held
