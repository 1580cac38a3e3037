"""Which parts of draft heads are divided (docs/adr/0022), and that ranks hold what one process
holds, cut in parts.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gemma4_oracle import load
from thread_ranks import as_ranks

from hydraspec.models import draft_place
from hydraspec.models.base import TargetModel
from hydraspec.models.checkpoint.reader import resolve_folder
from hydraspec.models.dense.config import read_dense_config
from hydraspec.models.dense.layer import DenseLayer
from hydraspec.models.draft_place import head_place, is_worth_dividing, layers_place
from hydraspec.models.eagle.loading import load_eagle
from hydraspec.models.gemma4.assistant import load_assistant
from hydraspec.models.mtp.loading import load_mtp
from hydraspec.models.parts import Part, held
from hydraspec.models.place import Place
from hydraspec.parallel.layout import Layout
from hydraspec.parallel.ranks import Ranks
from hydraspec.parallel.vocabulary import Vocabulary

HEADS = {
    "assistant": ("tiny_gemma4", "tiny_gemma4-assistant"),
    "centroid assistant": ("tiny_gemma4_e", "tiny_gemma4_e-assistant"),
    "eagle": ("tiny_mistral", "tiny_mistral-eagle"),
    "eagle3 with a narrow vocabulary": ("tiny_gemma4", "tiny_gemma4-eagle3"),
    "eagle3": ("tiny_qwen3", "tiny_qwen3-eagle3"),
    "peagle": ("tiny_qwen3", "tiny_qwen3-peagle"),
    "mtp with experts": ("tiny_deepseek", "tiny_deepseek"),
}


def load_head(name: str, weights: str, group: Any) -> tuple[TargetModel, Any]:
    target_name, drafter = HEADS[name]
    target = load(f"zoo:{target_name}", weights=weights, seed=3, group=group)
    given: dict[str, Any] = {"weights": weights, "target": target, "seed": 3}
    checkpoint, kind = f"zoo:{drafter}", name.split()[0]
    if kind == "mtp":
        return target, load_mtp(checkpoint, num_drafts=2, **given)
    if name.endswith("assistant"):
        return target, load_assistant(checkpoint, **given)
    return target, load_eagle(checkpoint, method=kind, **given)


@pytest.mark.parametrize(
    ("weights", "is_whole"), [("checkpoint", False), ("random", False), ("checkpoint", True)]
)
@pytest.mark.parametrize("name", HEADS)
def test_ranks_hold_parts_of_what_one_process_holds(
    name: str, weights: str, is_whole: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every weight, read from the file as a slice or drawn at random."""
    if is_whole:
        monkeypatch.setattr(draft_place, "is_worth_dividing", lambda *_: False)
    one = load_head(name, weights, Ranks().group)[1]
    wanted = {key: held(weight) for key, weight in one.tensors().items()}

    def work(ranks: Ranks) -> tuple[int, int]:
        _, head = load_head(name, weights, ranks.group)
        found = head.tensors()
        assert sorted(found) == sorted(wanted)
        for key, weight in found.items():
            own = wanted[key]
            if isinstance(weight, Part):
                own = weight.read(own.__getitem__)
            assert torch.equal(held(weight), own), key
        return head.memory_bytes(), sum(isinstance(x, Part) for x in found.values())

    counts = as_ranks(Layout(tensor=2), work)
    reads_target_kv = name.endswith("assistant")
    for num_bytes, num_parts in counts:
        if is_whole and not reads_target_kv:
            assert num_parts == ("embed_tokens.weight" in wanted)
        else:
            assert num_parts > 0
            assert num_bytes < one.memory_bytes()


def fake_target(size: int) -> Any:
    """A target on a device that this process need not have."""
    vocabulary = Vocabulary(1000, SimpleNamespace(rank=0, size=size))
    return SimpleNamespace(dtype=torch.bfloat16, device=torch.device("cuda"), vocabulary=vocabulary)


def dense_layers_are_divided(shape: str, size: int) -> bool:
    folder = resolve_folder(f"shape:{shape}")
    raw = json.loads((folder / "config.json").read_text())
    config = read_dense_config(raw["transformer_layer_config"], shape)

    def layers(place: Place) -> Any:
        return [DenseLayer(config, 0, place)]

    return layers_place(fake_target(size), config.divided, layers).group.size == size


def test_the_rule_over_published_shapes() -> None:
    """Large heads are divided, small ones are not; the numbers are ADR 22's."""
    assert dense_layers_are_divided("gemma4_31b-eagle3", 2)
    assert dense_layers_are_divided("llama3_1_8b-eagle3", 2)
    assert not dense_layers_are_divided("gemma4_31b-eagle3", 3)  # heads do not divide
    assert head_place(fake_target(2), 32_000, 5376).group.size == 2  # 344 MB: 39 us
    assert head_place(fake_target(4), 262_144, 1024).group.size == 4
    assert head_place(fake_target(2), 8_192, 1024).group.size == 1  # 17 MB: 2 us
    assert head_place(fake_target(1), 32_000, 5376).group.size == 1


def test_the_rule_turns_where_reading_takes_as_long_as_the_reductions() -> None:
    place = Place(torch.bfloat16, torch.device("cuda"), fake_target(4).vocabulary.group)
    even = int(2 * draft_place.REDUCTION_US * draft_place.BYTES_PER_US / 0.75)
    assert is_worth_dividing(place, int(even * 1.01), 2)
    assert not is_worth_dividing(place, int(even * 0.99), 2)
    assert is_worth_dividing(Place(place.dtype, torch.device("cpu"), place.group), 1, 2)


def test_layers_that_ranks_cannot_divide_are_held_whole() -> None:
    """Widths of 160 over 3 ranks, on a CPU, where all that can be divided is."""
    target = fake_target(3)
    target.device = torch.device("cpu")
    raw = json.loads((resolve_folder("zoo:tiny_gemma4-eagle3") / "config.json").read_text())
    config = read_dense_config(raw["transformer_layer_config"], "here")
    assert config.divided.obstacle(3) is not None
    assert layers_place(target, config.divided, lambda _: []).group.size == 1
