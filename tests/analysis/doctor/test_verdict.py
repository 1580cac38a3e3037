"""What is said about a drafter: odd weights, parts that harm, and which evidence decides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from planted_faults import Bed, bed
from torch import Tensor

from hydraspec.analysis.doctor.conclusion import damage_of
from hydraspec.analysis.doctor.diagnosis import diagnose
from hydraspec.analysis.doctor.expected import Expected, of_card
from hydraspec.analysis.doctor.parts import module_of, replaced, weights_of
from hydraspec.analysis.doctor.scores import score
from hydraspec.analysis.doctor.tensors import oddities
from hydraspec.analysis.doctor.verdict import Damage, judge

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
    assert (found.name, found.says, found.is_certain) == ("fc.weight", says, True)


def test_what_is_not_odd() -> None:
    unused_tokens = torch.cat([trained(60), torch.zeros(4, 48)])
    assert not oddities({"fc.weight": trained(), "lm_head.weight": unused_tokens})
    assert not oddities({"norm.weight": torch.ones(48)})
    (far,) = oddities({"fc.weight": with_one(100.0)})
    assert not far.is_certain, "wide checkpoints have such values"


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
    yield from bed("tiny_mistral", "eagle", num_prompts=6)


def planted(name: str, damage: Callable[[Tensor], Tensor]) -> Callable[[Bed], Any]:
    """A judgement of the pair with one weight replaced by `damage` of it."""

    def judged(found: Bed) -> Any:
        trial, k = found.patient.trial(), found.patient.k
        healthy = score(trial, found.texts, k).acceptance
        weight = weights_of(trial.head)[name]
        with replaced(trial.head, weight, damage(weight)):
            base = diagnose(trial, found.texts, found.patient.target, k, max_rounds=1)
            found_damage: list[Damage] = []

            def examined() -> Damage:
                found_damage[:] = found_damage or [damage_of(trial, found.texts, base.base, k)]
                return found_damage[0]

            return [
                judge(base, expected, examined) for expected in (Expected(healthy, "a test"), None)
            ]

    return judged


def shuffled(w: Tensor) -> Tensor:
    return w[torch.randperm(len(w), generator=torch.Generator().manual_seed(1))]


DAMAGED = {
    "shuffled rows": ("layers.1.mlp.down_proj.weight", shuffled, "layers.1.mlp"),
    "zero": ("layers.0.self_attn.o_proj.weight", torch.zeros_like, "layers.0.self_attn"),
    "a tenth": ("layers.0.mlp.up_proj.weight", lambda w: w / 10, "layers.0.mlp"),
}


@pytest.mark.parametrize(
    "fault", ["zero", *(pytest.param(n, marks=pytest.mark.slow) for n in DAMAGED if n != "zero")]
)
def test_damaged_weights_are_found_where_they_are(fault: str, pair: Bed) -> None:
    name, damage, module = DAMAGED[fault]
    for judgement in planted(name, damage)(pair):
        assert judgement.verdict == "weights"
        assert judgement.damage.module == module
        assert not judgement.repairs


def test_a_healthy_head_is_left_as_it_was(pair: Bed) -> None:
    trial, k = pair.patient.trial(), pair.patient.k
    before = {name: weight.clone() for name, weight in weights_of(trial.head).items()}
    base = score(trial, pair.texts, k)
    found = damage_of(trial, pair.texts, base, k)
    assert not found.certain
    assert not found.effects
    assert all(before[name].equal(weight) for name, weight in weights_of(trial.head).items())
    assert score(trial, pair.texts, k).acceptance == base.acceptance


# ------------------------------------------------------------------ which evidence decides


def diagnosis(acceptance: float, *repaired: float) -> Any:
    """Scores before and after repairs."""
    return SimpleNamespace(
        base=SimpleNamespace(acceptance=acceptance),
        is_unsure=False,
        found=[SimpleNamespace(scores=SimpleNamespace(acceptance=each)) for each in repaired],
    )


EXPECTED = Expected(3.0, "a test")


@pytest.mark.parametrize(
    ("found", "expected", "verdict"),
    [
        (diagnosis(2.8, 3.2), EXPECTED, "healthy"),
        (diagnosis(2.0, 2.9), EXPECTED, "convention"),
        (diagnosis(2.0, 2.3), EXPECTED, "weak"),
        (diagnosis(2.0, 2.1), None, "healthy"),
        (diagnosis(2.0, 2.9), None, "convention"),
        (diagnosis(1.1), None, "weak"),
    ],
    ids=["reaches it", "half the way", "too little", "under 10 %", "a repair", "poor"],
)
def test_what_decides(found: Any, expected: Expected | None, verdict: str) -> None:
    assert judge(found, expected, Damage).verdict == verdict
