"""A drafter takes from its target what it shares, and leaves the target as it was."""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from eagle_folders import (
    SIZE,
    VOCAB,
    FakeTarget,
    draw_eagle1,
    draw_eagle3,
    write_consolidated,
    write_speculators,
)
from eagle_rows import load as load_head
from gemma4_oracle import load, load_zoo, make_target, text_config
from graph_runs import PAIRS, graph_config, make_graph_engine, run_requests, zoo_requests

from hydraspec.models import draft_tables
from hydraspec.models.checkpoint.reader import resolve_folder
from hydraspec.speculators.registry import build_speculator


def facts_of(target: Any) -> tuple[dict[str, torch.Tensor], str]:
    """Its weights, and whatever else it is set to."""
    weights = {name: tensor.clone() for name, tensor in target.tensors().items()}
    plain = (int, float, str, bool, tuple, type(None), torch.dtype)
    about = {name: value for name, value in vars(target).items() if isinstance(value, plain)}
    return weights, repr((about, target.config))


@pytest.mark.parametrize("method", [name for name in PAIRS if name != "none"])
def test_loading_a_drafter_changes_nothing_of_its_target(method: str) -> None:
    """Catches shared weights changed in place, and settings changed in a shared config."""
    config = graph_config(method, "none")
    before = copy.deepcopy(dataclasses.asdict(config))
    target = load_zoo(PAIRS[method][0])
    weights, about = facts_of(target)
    speculator = build_speculator(config)
    speculator.load(target)
    speculator.kv_groups(16, target.num_layers)
    weights_now, about_now = facts_of(target)
    assert about_now == about
    assert weights_now.keys() == weights.keys()
    for name, tensor in weights.items():
        assert weights_now[name].equal(tensor), name
    assert dataclasses.asdict(config) == before


@pytest.mark.parametrize("tied", [True, False])
def test_the_table_that_drafters_share_is_not_scaled(tied: bool, tmp_path: Path) -> None:
    """Gemma's scale is the target's own affair: EAGLE heads learn on the plain embedding."""
    model = make_target(text_config(tie_word_embeddings=tied), 1)
    model.save_pretrained(tmp_path)
    assert load(tmp_path).table.weight.equal(model.model.embed_tokens.weight)


@pytest.mark.parametrize("place", [None, 0, VOCAB - 1])
def test_an_embedding_is_compared_in_pieces(
    place: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of the target's are given up, also by the last row; nowhere is all of it compared at
    once, which takes memory that a device may not have.
    """
    rng = np.random.default_rng(5)
    target = FakeTarget(rng, hidden_size=SIZE, vocab_size=VOCAB)
    plain = draw_eagle3(rng, target)
    while plain.layer["hidden_size"] != SIZE:
        plain = draw_eagle3(rng, target)
    table = target.table.weight.clone()
    if place is not None:
        table[place, -1] += 1
    plain.weights["embed_tokens.weight"] = table
    sizes: list[int] = []
    true_equal = torch.equal

    def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
        sizes.extend(a.shape[:-1])  # of tables
        return true_equal(a, b)

    with monkeypatch.context() as patch:
        patch.setattr(draft_tables, "COMPARED_ROWS", 7)
        patch.setattr(torch, "equal", equal)
        head = load_head(write_speculators(tmp_path / "d", plain), "eagle3", target)
    assert (head.embedding is target.table) == (place is None)
    assert 0 < max(sizes) <= 7


def test_quantisation_in_mistrals_own_params_does_not_leak(tmp_path: Path) -> None:
    """The drafter of an fp8 target carries its key; its own float weights decide."""
    target = FakeTarget(np.random.default_rng(1), hidden_size=SIZE, vocab_size=VOCAB)
    head = draw_eagle1(np.random.default_rng(3), target, is_mistral=True)
    where = write_consolidated(tmp_path / "d", head)
    params = json.loads((where / "params.json").read_text())
    params["quantization"] = {"qformat_weight": "fp8_e4m3"}
    (where / "params.json").write_text(json.dumps(params))
    loaded = load_head(where, "eagle", target)
    assert loaded.fc is not None
    assert loaded.fc.weight.t().equal(head.weights["fc.weight"])


def test_a_drafter_made_for_fewer_positions_drafts_on_behind_them(tmp_path: Path) -> None:
    """No table of positions ends: the drafts are those of the same head with a longer limit."""
    config = graph_config("eagle3", "none")
    requests = zoo_requests(2, longest=12)
    wanted = run_requests(make_graph_engine(config, None), requests)
    drafter = config.method.checkpoint
    assert drafter is not None
    (tmp_path / "model.safetensors").symlink_to(resolve_folder(drafter) / "model.safetensors")
    raw = json.loads((resolve_folder(drafter) / "config.json").read_text())
    raw["transformer_layer_config"]["max_position_embeddings"] = 16
    (tmp_path / "config.json").write_text(json.dumps(raw))
    config.method.checkpoint = str(tmp_path)
    engine = make_graph_engine(config, None)
    assert any("16 positions" in warning for warning in engine.info.warnings)
    run = run_requests(engine, requests)
    assert (run.outputs, run.drafts) == (wanted.outputs, wanted.drafts)
    assert all(len(request.prompt_token_ids or ()) > 16 for request in requests)
    assert run.num_accepted > 0
