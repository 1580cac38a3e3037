"""Splits of a target's layers over pipeline stages, and what a stage holds."""

from __future__ import annotations

import pytest
import torch
from gemma4_oracle import load

from hydraspec.models.parts import Part, held, memory_bytes
from hydraspec.models.stages import LayerFacts, Stage, layers_of_stage
from hydraspec.types import ConfigurationError


def facts(num_layers: int, *, head_bytes: int = 0, sources: dict[int, int] | None = None):  # type: ignore[no-untyped-def]
    """Layers of 10 bytes; sources: layers that read another's KV."""
    return LayerFacts(
        num_bytes=[10] * num_layers,
        head_bytes=head_bytes,
        kv_sources=[(sources or {}).get(i, i) for i in range(num_layers)],
        kinds=["full_attention" if i % 3 == 2 else "sliding_attention" for i in range(num_layers)],
    )


def split(count: int, known: LayerFacts, **changes: object) -> list[int]:
    """Layers of each stage."""
    stages = [Stage(index=i, count=count, **changes) for i in range(count)]  # type: ignore[arg-type]
    found = [layers_of_stage(stage, known) for stage in stages]
    assert [i for layers in found for i in layers] == list(range(len(known.num_bytes)))
    return [len(layers) for layers in found]


def test_a_balanced_split_counts_the_head_with_the_last_stage() -> None:
    assert split(2, facts(12)) == [6, 6]
    assert split(4, facts(14)) in ([4, 4, 3, 3], [3, 4, 4, 3], [3, 3, 4, 4], [4, 3, 3, 4])
    assert split(2, facts(12, head_bytes=40)) == [8, 4]
    assert sorted(split(5, facts(7))) == [1, 1, 1, 2, 2]


def test_layers_that_share_kv_stay_with_their_source() -> None:
    shared = facts(12, sources={8: 7, 9: 6, 10: 7, 11: 6})
    assert split(2, shared) == [6, 6]
    assert split(3, shared) == [3, 3, 6]
    assert split(2, shared, num_layers=(2, 10)) == [2, 10]
    for border in (7, 8, 9, 10, 11):
        with pytest.raises(ConfigurationError) as refused:
            split(2, shared, num_layers=(border, 12 - border))
        told = str(refused.value)
        assert f"parallelism.pipeline_layers=[{border}, {12 - border}]" in told
        assert "stages end after 1 to 6 layers" in told
        assert "layers 8 to 11 read KV of layers from 6 on" in told
        assert "[6, 6]" in told


def test_layers_a_drafter_reads_are_on_the_last_stage() -> None:
    known = facts(12, head_bytes=1000)
    assert split(2, known) == [11, 1]
    assert split(2, known, drafter_reads_kv=True) == [10, 2]  # layers 10 and 11
    with pytest.raises(
        ConfigurationError, match="the drafter reads KV of layers 10, 11"
    ) as refused:
        split(2, known, drafter_reads_kv=True, num_layers=(11, 1))
    assert "the one before the last after 1 to 10" in str(refused.value)


@pytest.mark.parametrize("layers", [(12,), (6, 5), (12, 0), (13, -1), (4, 4, 4)])
def test_a_split_that_does_not_add_up_is_refused(layers: tuple[int, ...]) -> None:
    with pytest.raises(ConfigurationError, match=r"2 numbers that add up to 12"):
        split(2, facts(12), num_layers=layers)


def test_more_stages_than_borders_are_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"parallelism.pipeline=4(.|\n)*allowed: 1 to 3"):
        split(4, facts(12, sources={11: 2}))
    with pytest.raises(ConfigurationError, match=r"parallelism.pipeline=13(.|\n)*allowed: 1 to 12"):
        split(13, facts(12))


@pytest.mark.parametrize("weights", ["checkpoint", "random"])
@pytest.mark.parametrize("name", ["tiny_gemma4_e", "tiny_qwen3", "tiny_deepseek"])
def test_a_stage_has_the_weights_of_the_whole_model(name: str, weights: str) -> None:
    whole = load(f"zoo:{name}", torch.float64, weights=weights, seed=3).tensors()
    found = []
    for index in range(2):
        target = load(
            f"zoo:{name}",
            torch.float64,
            weights=weights,
            seed=3,
            stage=Stage(index=index, count=2),
        )
        tensors = target.tensors()
        assert tensors.keys() == whole.keys()
        present = {name: weight for name, weight in tensors.items() if not held(weight).is_meta}
        for each, weight in present.items():
            known = held(whole[each])
            if isinstance(weight, Part):
                assert weight.shape == known.shape
                assert held(weight).numel() < known.numel()
                known = weight.read(known.__getitem__)
            assert torch.equal(held(weight), known), each
        assert target.memory_bytes() == memory_bytes(present) < memory_bytes(whole)
        found.append(present)
    in_both = found[0].keys() & found[1].keys()
    assert whole.keys() == found[0].keys() | found[1].keys()
    for each in in_both:  # held twice, but for the columns of per-layer inputs
        parts = [found[i][each] for i in range(2)]
        if isinstance(parts[0], Part):
            sizes = sum(held(part).numel() for part in parts)
            assert sizes == held(whole[each]).numel(), each
        else:
            assert each in ("embed_tokens.weight", "per_layer_projection_norm.weight")
