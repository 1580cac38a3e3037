"""Steps that read images run eagerly beside graphs of all others, wait for no result of the device,
and are rehearsed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from graph_runs import attention_as_on_devices, count_launches, make_graph_engine
from image_worlds import make_world, request_of
from recorded_graphs import RecordedOps
from side_by_side import run_alone
from tiny_targets import run_config
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from hydraspec.config.schema import RunConfig, Weights
from hydraspec.engine.native import NativeEngine
from hydraspec.engine.run import images
from hydraspec.models import image_batch
from hydraspec.types import Request, SamplingParams

LONGEST = 10


def settings_of(world: Any, mode: str) -> RunConfig:
    config = run_config(
        *(world.folder,),
        **{"method": world.method, "drafter": world.drafter, "k": 3, "max_model_len": 90},
        **{"max_num_seqs": 4, "max_num_batched_tokens": 24, "seed": 7},
    )
    config.method.weights = Weights.checkpoint
    config.cudagraph.name = mode
    config.cudagraph.capture_sizes = [2, 4]
    return config


def requests_of(world: Any) -> list[Request]:
    sampling = SamplingParams(max_tokens=LONGEST, ignore_eos=True)
    prompts = list(world.prompts.values())
    return [request_of(prompt, i, sampling) for i, prompt in enumerate(prompts)]


@pytest.fixture(scope="module", params=["eagle3 reads images", "peagle reads images", "dflash"])
def world(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make_world(tmp_path_factory.mktemp("world"), request.param)


@pytest.mark.parametrize("mode", ["full", "full_and_piecewise"])
def test_images_are_read_outside_of_graphs(
    mode: str, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are those of uncached passes; decodes replay graphs in the same run, also beside
    prompts with images."""
    attention_as_on_devices(monkeypatch)
    engine = make_graph_engine(settings_of(world, mode), RecordedOps())
    counts = count_launches(engine, monkeypatch)
    seen = run_alone(engine, requests_of(world))
    expected = [more[:LONGEST] for more in world.continuations.values()]
    found = [seen.completions[i].output_token_ids for i in range(len(expected))]
    assert found == expected
    assert counts["decode"] > 0
    assert counts["eager"] > 0


def test_encoding_asks_the_device_for_nothing(world: Any) -> None:
    """Under FakeTensorMode a read of the device raises, as a shape that depends on data does."""
    pictures = [image for prompt in world.prompts.values() for image in prompt.images]
    assert len({len(image.patches) for image in pictures}) > 1
    with FakeTensorMode(allow_non_fake_inputs=True):
        found = world.target.encoder.encode(pictures)
    assert all(isinstance(rows, FakeTensor) for rows in found)
    assert [len(rows) for rows in found] == [image.num_tokens for image in pictures]


def test_the_largest_image_is_one_that_the_encoder_reads(world: Any) -> None:
    encoder = world.target.encoder
    image = encoder.largest_image()
    assert encoder.fault(image) is None
    (rows,) = encoder.encode([image])
    assert rows.shape == (image.num_tokens, world.target.hidden_size)
    assert torch.isfinite(rows).all()


def test_the_largest_image_fills_a_pass() -> None:
    image = image_batch.largest_image(3, 768, 10240)
    assert 0.9 * image_batch.MOST_VALUES < image.patches.size <= image_batch.MOST_VALUES
    assert image.positions.max() < 10240
    assert image_batch.fault(image, 3, 768, 10240) is None
    small = image_batch.largest_image(1, 6912, 20)
    assert small.num_tokens == 400


def test_kept_rows_count_as_memory(world: Any) -> None:
    engine = NativeEngine(settings_of(world, "none"))
    store = engine.parts.runner.images
    assert store.kept_bytes == images.MOST_ROWS * world.target.hidden_size * 8
    store.encode_largest()
    assert store.num_encoded == 0
