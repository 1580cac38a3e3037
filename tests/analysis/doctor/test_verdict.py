"""What is said about a drafter: odd weights, parts that harm, and which evidence decides."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from planted_faults import Bed, bed
from torch import Tensor

from hydraspec.analysis.doctor.expected import Expected, of_card, usual
from hydraspec.analysis.doctor.parts import module_of, weights_of
from hydraspec.analysis.doctor.retraining import Retrained, retrained
from hydraspec.analysis.doctor.scores import score
from hydraspec.analysis.doctor.tensors import Oddity, oddities
from hydraspec.analysis.doctor.verdict import Damage, Judgement, judge, sentence

DRAW = torch.Generator().manual_seed(4)


def trained(rows: int = 64, columns: int = 48) -> Tensor:
    return torch.randn(rows, columns, generator=DRAW) * 0.05


def with_values(count: int) -> Tensor:
    return torch.randint(count, (64, 48), generator=DRAW) - count // 2.0


def with_one(value: float) -> Tensor:
    w = trained()
    w[3, 5] = value
    return w


ODD = {
    "is 0 everywhere": torch.zeros(64, 48),
    "is zero in 50% of its rows": torch.cat([trained(32), torch.zeros(32, 48)]),
    "is zero in 25% of its columns": torch.cat([trained(64, 36), torch.zeros(64, 12)], 1),
    "repeats 50% of its rows": trained(32).repeat(2, 1),
    "has only 5 different values": with_values(5),
    "has 1 values that are not finite": with_one(torch.nan),
}


@pytest.mark.parametrize("says", ODD)
def test_values_that_training_does_not_leave(says: str) -> None:
    (found,) = oddities({"fc.weight": ODD[says]})
    assert found == Oddity("fc.weight", says)


def test_what_is_not_odd() -> None:
    unused_tokens = torch.cat([trained(60), torch.zeros(4, 48)])
    assert not oddities({"fc.weight": trained(), "lm_head.weight": unused_tokens})
    assert oddities({"lm_head.weight": trained(32).repeat(2, 1)}), "half of all tokens"
    assert not oddities({"norm.weight": torch.ones(48)})
    assert not oddities({"fc.weight": with_one(5.0)}), "wide checkpoints have such values"
    assert oddities({"fc.weight": with_one(1e3)})


@pytest.mark.parametrize(
    ("name", "module"),
    [
        ("layers.1.self_attn.q_proj.weight", "layers.1.self_attn"),
        ("layers.0.post_attention_layernorm.weight", "layers.0.mlp"),
        ("model.layers.12.mlp.experts.3.up_proj.weight", "model.layers.12.mlp"),
        ("fc.weight", "fc"),
    ],
)
def test_a_norm_belongs_to_the_part_after_it(name: str, module: str) -> None:
    assert module_of(name) == module


CARD = """---
model-index:
- name: head
  results:
  - metrics:
    - {type: acceptance_length, value: 3.2, args: {num_speculative_tokens: 3}}
---
"""


def test_a_card_speaks_of_its_own_number_of_drafts(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text(CARD)
    found = of_card(tmp_path, 3)
    assert found is not None
    assert found.acceptance_length == 3.2
    assert of_card(tmp_path, 5) is None
    (tmp_path / "README.md").write_text("# No front matter")
    assert of_card(tmp_path, 3) is None


# ------------------------------------------------------------------ a head


@pytest.fixture(scope="module")
def pair() -> Iterator[Bed]:
    yield from bed("tiny_mistral", "eagle", num_prompts=16)


def shuffled(w: Tensor) -> Tensor:
    return w[torch.randperm(len(w), generator=torch.Generator().manual_seed(1))]


DAMAGED = {
    "shuffled rows": ("layers.1.mlp.down_proj.weight", shuffled, "layers.1.mlp"),
    "a tenth": ("layers.0.mlp.up_proj.weight", lambda w: w / 10, "layers.0.mlp"),
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", DAMAGED)
def test_training_a_damaged_part_alone_helps_most(fault: str, pair: Bed) -> None:
    """Catches gradients of the wrong weight, and a part that stays trained."""
    name, damage, module = DAMAGED[fault]
    trial, k = pair.patient.trial(), pair.patient.k
    weight = weights_of(trial.head)[name]
    kept = weight.clone()
    try:
        weight.copy_(damage(weight))
        before = score(trial, pair.texts, k).acceptance
        parts = retrained(trial, pair.patient.target, pair.texts, k)
        assert score(trial, pair.texts, k).acceptance == before
    finally:
        weight.copy_(kept)
    assert parts[0].module == module
    assert Damage(parts=parts).explains(3.1 - before)


def test_training_a_part_of_a_healthy_head_brings_nothing(pair: Bed) -> None:
    trial, k = pair.patient.trial(), pair.patient.k
    assert not oddities(weights_of(trial.head))
    before = {name: weight.clone() for name, weight in weights_of(trial.head).items()}
    parts = retrained(trial, pair.patient.target, pair.texts, k)
    assert not Damage(parts=parts).explains(None)
    assert all(before[name].equal(weight) for name, weight in weights_of(trial.head).items())


# ------------------------------------------------------------------ which evidence decides


def diagnosis(acceptance: float, *repaired: float) -> Any:
    """Scores before and after repairs."""
    return SimpleNamespace(
        base=SimpleNamespace(acceptance=acceptance),
        is_unsure=False,
        found=[SimpleNamespace(scores=SimpleNamespace(acceptance=each)) for each in repaired],
    )


def after_training(*reached: float) -> list[Retrained]:
    """Parts by the acceptance length that training each alone reaches, from 2."""
    return [
        Retrained(
            module=str(i),
            tensor="",
            acceptance=each,
            before=2.0,
            drafts=each - 2.0,
            probability=each - 2.0,
        )
        for i, each in enumerate(reached)
    ]


OWN, USUAL = Expected(3.0, "a test says"), Expected(3.0, "others reach", is_own=False)
NAN = [Oddity("fc.weight", "has 1 values that are not finite")]


@pytest.mark.parametrize(
    ("found", "expected", "odd", "parts", "verdict"),
    [
        (diagnosis(2.75, 3.2), OWN, NAN, (), "healthy"),
        (diagnosis(2.0), USUAL, [], (2.05, 2.05), "weak"),
        (diagnosis(2.85), USUAL, [], (), "healthy"),
        (diagnosis(2.85), USUAL, NAN, (), "weights"),
        (diagnosis(2.0, 2.9), OWN, [], (), "convention"),
        (diagnosis(2.0, 2.6), OWN, NAN, (), "weights"),
        (diagnosis(2.0, 2.3), OWN, [], (2.05, 2.05), "weak"),
        (diagnosis(2.0), OWN, [], (2.3, 2.1), "weights"),
        (diagnosis(2.0, 2.1), None, [], (2.1, 2.1), "healthy"),
        (diagnosis(2.0), None, [], (2.4, 2.1), "weights"),
        (diagnosis(2.0, 2.9), None, [], (), "convention"),
        (diagnosis(1.1), None, [], (2.0, 2.0), "weak"),
    ],
    ids=[
        "its card is reached",
        "others reach more",
        "others reach as much",
        "odd values",
        "a repair",
        "a repair that odd values make doubtful",
        "a repair that recovers too little",
        "one part stands out",
        "a repair that gains under 10 %",
        "one part stands out, nothing expected",
        "a repair, nothing expected",
        "poor",
    ],
)
def test_what_decides(
    found: Any, expected: Expected | None, odd: list[Oddity], parts: tuple[float, ...], verdict: str
) -> None:
    assert judge(found, expected, odd, lambda: after_training(*parts)).verdict == verdict


def test_a_trained_part_says_what_it_gained_and_accuses_no_weight() -> None:
    damage = Damage(parts=after_training(2.3, 2.1))
    said = sentence(Judgement(verdict="weights", damage=damage), diagnosis(2.0), OWN)
    assert "take acceptance from 2.00 to 2.30, on any other part to less" in said
    assert "need not be the weight that is wrong" in said


def test_what_others_reach_holds_for_text_that_is_as_certain() -> None:
    found = usual("mtp", 3, 0.999)
    assert found is not None
    assert found.acceptance_length == pytest.approx(3.498, abs=1e-3), "the zoo's own figure"
    assert usual("mtp", 3, 0.9) is None
