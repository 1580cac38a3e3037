"""Faults drawn by chance: the same from the same seed, and a small trial of the doctor."""

from __future__ import annotations

from pathlib import Path

import pytest
from blind_table import totals
from blind_trial import module, read, run_round
from drawn_conventions import draw_convention
from drawn_faults import Files, draw_weight_fault
from drawn_heads import HARMLESS, HARMLESS_A_ROUND, draw_harmless
from planted_faults import PAIRS

ROUNDED = "another rounding to bf16"
SEED = 3  # of development; the verdict's is the hash of a commit
EAGLE = PAIRS.index(("tiny_mistral", "eagle"))


def files() -> Files:
    return Files.of("zoo:tiny_mistral-eagle")


def test_a_seed_draws_the_same_fault() -> None:
    one, two = files(), files()
    assert draw_weight_fault(one, (SEED, 1)) == draw_weight_fault(two, (SEED, 1))
    assert draw_convention(one, "eagle", (SEED, 1)).says == (
        draw_convention(two, "eagle", (SEED, 1)).says
    )
    assert one.config == two.config
    same = (one.tensors[name].equal(two.tensors[name]) for name in one.tensors)
    assert all(same) or any(tensor.isnan().any() for tensor in one.tensors.values())


def test_draws_differ_and_change_something() -> None:
    healthy, found = files(), set()
    for number in range(20):
        drawn = files()
        damage = draw_weight_fault(drawn, (SEED, number))
        found.add((damage.says, damage.names))
        assert any(not drawn.tensors[n].equal(healthy.tensors[n]) for n in damage.names), damage
    assert len(found) > 15


@pytest.mark.parametrize("kind", ["noise of 1 % of a deviation", "FP8", "FP8 by row", ROUNDED])
def test_harmless_heads_differ_a_little(kind: str, tmp_path: Path) -> None:
    """Catches a kind that leaves every weight as it is, which would test nothing, and one that is
    no rounding any more.
    """
    turn, index = divmod(HARMLESS.index(kind), HARMLESS_A_ROUND)
    drawn, healthy = files(), files().tensors
    assert (
        draw_harmless(drawn, "tiny_mistral-eagle", tmp_path / "head", (SEED, turn, 3, index))
        == kind
    )
    for name in drawn.drafters_weights():
        now, before = drawn.tensors[name].float(), healthy[name].float()
        if before.dim() > 1:
            assert 1e-4 < float((now - before).norm() / before.norm()) < 0.05, name


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("layers.1.attention.wq.weight", "layers.1.self_attn"),
        ("eagle_linear.weight", "fc"),
        ("model.layers.12.hnorm.weight", "layers.12.eh_proj"),
        ("norm.weight", "lm_head"),
    ],
)
def test_names_in_files_have_the_part_that_the_doctor_names(name: str, part: str) -> None:
    assert module(name) == part


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_small_trial(tmp_path: Path) -> None:
    """Catches a doctor that calls broken heads healthy, or healthy ones broken. The whole trial is
    `python tests/support/blind_trial.py --seed auto --jobs 2 --out FILE`.
    """
    out = tmp_path / "rows.jsonl"
    run_round((SEED, EAGLE, 0, {"convention": 2, "weights": 2, "weak": 1, "harmless": 2}), out)
    rows = read(out)
    print("; ".join(totals(rows)))  # noqa: T201
    harmful = [row for row in rows if row["kind"] == "harmful"]
    assert len(harmful) == 5
    assert sum(row["is_right"] for row in harmful) >= 4
    assert all(row["verdict"] != "healthy" for row in harmful if row["lost"] >= 0.15)
    assert all(row["is_right"] for row in rows if row["kind"] == "harmless")
