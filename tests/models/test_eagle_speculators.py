"""EAGLE-3 and P-EAGLE heads against the model classes of the `speculators` package, on folders that
these classes saved.

Their layout is one for training: the rows of all draft steps stand in one pass, tokens are the
text's own (teacher forcing), and positions start at 1. Rotation only sees distances, so the offset
makes no difference.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from eagle_folders import FakeTarget, matrix
from eagle_rows import PagedRows, load, target_step

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("speculators", reason="runs in an environment of its own: make test-oracle")
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig, core
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig, Qwen3Config

pytestmark = pytest.mark.filterwarnings("ignore")  # of third parties

NUM_CONFIGS = 20
# Their rotary table is float32 whatever the model's type; all else is float64.
CLOSE = {"rtol": 1e-5, "atol": 2e-6}
SIZE, VOCAB = 16, 40


def draw_layer(rng: np.random.Generator) -> Any:
    kv_heads, group = int(rng.choice([1, 2])), int(rng.choice([1, 2]))
    is_qwen = bool(rng.random() < 0.5)
    fields: dict[str, Any] = {
        "vocab_size": VOCAB,
        "hidden_size": SIZE,
        "intermediate_size": 24,
        "num_hidden_layers": int(rng.choice([1, 2, 3])),
        "num_attention_heads": kv_heads * group,
        "num_key_value_heads": kv_heads,
        "head_dim": int(rng.choice([4, 8])),
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "attention_bias": bool(rng.random() < 0.3),
        "hidden_act": str(rng.choice(["silu", "gelu_pytorch_tanh"])),
    }
    config = (Qwen3Config if is_qwen else LlamaConfig)(**fields)
    config._attn_implementation = "eager"
    return config


def draw_model(
    rng: np.random.Generator, folder: Path, kind: str, **said: Any
) -> tuple[Any, tuple[int, ...]]:
    """A model of theirs with random weights and what is `said`, saved by itself, and its aux
    layers.
    """
    layer = draw_layer(rng)
    ids = tuple(int(i) for i in rng.permutation(7)[: int(rng.integers(1, 5))])
    rows = VOCAB - 9 if rng.random() < 0.6 else VOCAB
    norms = int(rng.integers(0, 3))
    settings: dict[str, Any] = {
        "transformer_layer_config": layer,
        "draft_vocab_size": rows,
        "norm_before_residual": bool(rng.random() < 0.5),
        "norm_before_fc": norms == 1,
        "fc_norm": norms == 2,
        "norm_output": bool(rng.random() < 0.5),
        "eagle_aux_hidden_state_layer_ids": list(ids),
        "speculators_config": SpeculatorsConfig(
            algorithm=kind,
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=4)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
    } | said
    if kind == "peagle":
        model = PEagleDraftModel(PEagleSpeculatorConfig(mask_token_id=7, **settings))
    else:
        model = Eagle3DraftModel(Eagle3SpeculatorConfig(**settings))
    model = model.double().eval()
    for name, part in model.named_parameters():
        is_norm = part.dim() == 1 and "bias" not in name
        drawn = rng.uniform(0.5, 1.5, part.shape) if is_norm else rng.standard_normal(part.shape)
        part.data.copy_(torch.from_numpy(drawn) * (1.0 if is_norm else part.shape[-1] ** -0.5))
    if rows != VOCAB:
        kept = torch.from_numpy(rng.permutation(VOCAB)[:rows]).sort().values
        t2d = torch.zeros(VOCAB, dtype=torch.bool)
        t2d[kept] = True
        model.load_vocab_mappings(t2d, kept - torch.arange(rows))
    model.save_pretrained(folder)
    return model, ids


def record_logits(model: Any) -> list[torch.Tensor]:
    seen: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, args, out: seen.append(out[0]))
    return seen


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


@pytest.mark.parametrize("seed", range(NUM_CONFIGS))
def test_eagle3_steps_equal_theirs(tmp_path: Path, seed: int) -> None:
    """Logits of every step of a chain of 4, from a row in the midst of the text."""
    rng = np.random.default_rng([41, seed])
    k, n = 4, int(rng.integers(8, 16))
    model, ids = draw_model(rng, tmp_path / "d", "eagle3")
    text = torch.from_numpy(rng.integers(0, VOCAB, n))
    aux = [matrix(rng, n - 1, SIZE) * 5 for _ in ids]
    theirs = record_logits(model)
    model(
        torch.cat(aux, -1)[None],
        text[None, 1:],
        torch.zeros(1, n - 1, dtype=torch.int64),
        ttt_steps=k,
    )
    head = load(tmp_path / "d", "eagle3", FakeTarget(rng, hidden_size=SIZE, vocab_size=VOCAB))
    assert head.spec.aux_layer_ids == ids
    row = n - 2 - k  # the text covers its chain and one token more
    hidden = head.combine_target_hidden(target_step(aux[0], [x[: row + 1] for x in aux]))
    paged = PagedRows(head, n + k)
    states, feedback = head.forward(paged.rows(text[1 : row + 2], 0), hidden, paged.caches, step=0)
    for step in range(k):
        ours = head.compute_logits(states[-1:])[0]
        torch.testing.assert_close(ours, theirs[step][row], **CLOSE)
        place = row + 1 + step
        states, feedback = head.forward(
            paged.rows(text[place + 1 : place + 2], place), feedback[-1:], paged.caches, step=step
        )


@pytest.mark.parametrize("seed", range(NUM_CONFIGS))
def test_peagle_pass_equals_theirs(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits of the newest row and of three mask rows behind it; their sampler of rows is told
    which.
    """
    rng = np.random.default_rng([42, seed])
    k, n = 4, int(rng.integers(8, 16))
    model, ids = draw_model(rng, tmp_path / "d", "peagle")
    text = torch.from_numpy(rng.integers(0, VOCAB, n))
    aux = [matrix(rng, n - 1, SIZE) * 5 for _ in ids]
    row = n - 1 - k
    anchors = torch.cat((torch.arange(n - 1), torch.full((k - 1,), row)))
    depths = torch.cat((torch.zeros(n - 1, dtype=torch.int64), torch.arange(1, k)))
    monkeypatch.setattr(core, "generate_cod_sample_indices", lambda **_: (anchors, depths))
    monkeypatch.setattr(core, "compute_metrics", lambda **_: (torch.tensor(0.0), {}))
    theirs = record_logits(model)
    model(
        torch.cat(aux, -1)[None],
        text[None, 1:],
        torch.zeros(1, n - 1, dtype=torch.int64),
        verifier_last_hidden_states=torch.zeros(1, n - 1, SIZE, dtype=torch.float64),
    )
    head = load(tmp_path / "d", "peagle", FakeTarget(rng, hidden_size=SIZE, vocab_size=VOCAB))
    assert head.mask_hidden is not None
    hidden = head.combine_target_hidden(target_step(aux[0], [x[: row + 1] for x in aux]))
    tokens = torch.cat((text[1 : row + 2], torch.full((k - 1,), 7)))
    entering = torch.cat((hidden, head.mask_hidden.expand(k - 1, -1)))
    paged = PagedRows(head, n + k)
    states, _ = head.forward(paged.rows(tokens, 0), entering, paged.caches, step=0)
    ours = head.compute_logits(states)
    torch.testing.assert_close(ours[: row + 1], theirs[0][: row + 1], **CLOSE)
    torch.testing.assert_close(ours[row + 1 :], theirs[0][n - 1 :], **CLOSE)


def test_a_silent_eagle3_folder_is_theirs_only_with_the_norm_passed(tmp_path: Path) -> None:
    """Their class takes false where the key is missing, vLLM and we true (ADR 17)."""
    assert Eagle3SpeculatorConfig.model_fields["norm_before_residual"].default is False
    assert PEagleSpeculatorConfig.model_fields["norm_before_residual"].default is False
    rng = np.random.default_rng(43)
    model, ids = draw_model(rng, tmp_path / "d", "eagle3", norm_before_residual=True)
    written = tmp_path / "d" / "config.json"
    config = json.loads(written.read_text())
    assert config.pop("norm_before_residual") is True  # it writes the key
    written.write_text(json.dumps(config))
    text, aux = torch.from_numpy(rng.integers(0, VOCAB, 6)), [matrix(rng, 5, SIZE) for _ in ids]
    theirs = record_logits(model)
    places = torch.zeros(1, 5, dtype=torch.int64)
    model(torch.cat(aux, -1)[None], text[None, 1:], places, ttt_steps=1)
    head = load(tmp_path / "d", "eagle3", FakeTarget(rng, hidden_size=SIZE, vocab_size=VOCAB))
    hidden = head.combine_target_hidden(target_step(aux[0], aux))
    paged = PagedRows(head, 6)
    states, _ = head.forward(paged.rows(text[1:], 0), hidden, paged.caches, step=0)
    torch.testing.assert_close(head.compute_logits(states), theirs[0], **CLOSE)
