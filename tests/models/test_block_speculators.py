"""DFlash, DSpark and DFlash2 heads against the model classes of the `speculators` package, on
folders that these classes saved.

Their layout is one for training: blocks of anchors drawn from the text stand behind it in one pass,
and a Markov head reads the text's own tokens (teacher forcing).
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from block_rows import load
from eagle_folders import FakeTarget, matrix
from eagle_rows import PagedRows, target_step

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("speculators", reason="runs in an environment of its own: make test-oracle")
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
    from speculators.models.dflash import core as dflash_core
    from speculators.models.dflash2 import DFlash2DraftModel, DFlash2SpeculatorConfig
    from speculators.models.dflash2 import core as dflash2_core
    from speculators.models.dspark import DSparkDraftModel, DSparkSpeculatorConfig
    from speculators.models.dspark import core as dspark_core
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import Qwen3Config

pytestmark = pytest.mark.filterwarnings("ignore")  # of third parties

NUM_CONFIGS = 30
# Their rotary table is float32 whatever the model's type.
CLOSE = {"rtol": 1e-5, "atol": 2e-6}
CLOSE_IN_FLOAT32 = {"rtol": 1e-4, "atol": 1e-5}  # of logits up to about 4
CLOSE_WITH_CONVOLUTIONS = {"rtol": 1e-4, "atol": 2e-5}  # which enlarge the difference
SIZE, VOCAB = 16, 40
KINDS = ("full_attention", "sliding_attention")


@pytest.fixture(autouse=True)
def no_grad():
    with torch.no_grad():
        yield


def draw_layer(rng: np.random.Generator) -> Any:
    kv_heads, group = int(rng.choice([1, 2])), int(rng.choice([1, 2]))
    count = int(rng.choice([1, 2, 3]))
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=SIZE,
        intermediate_size=24,
        num_hidden_layers=count,
        num_attention_heads=kv_heads * group,
        num_key_value_heads=kv_heads,
        head_dim=int(rng.choice([4, 8])),
        max_position_embeddings=256,
        rms_norm_eps=1e-5,
        attention_bias=bool(rng.random() < 0.3),
        use_sliding_window=True,
        max_window_layers=0,
        sliding_window=int(rng.integers(3, 9)),
        layer_types=[str(kind) for kind in rng.choice(KINDS, count)],
    )
    config._attn_implementation = "eager"
    return config


def draw_model(
    rng: np.random.Generator, folder: Path, kind: str, dtype: torch.dtype
) -> tuple[Any, FakeTarget]:
    """A model of theirs with random weights, saved by itself, and a target with its tables."""
    ids = [int(i) for i in 1 + rng.permutation(6)[: int(rng.integers(1, 4))]]
    rows = VOCAB - 9 if rng.random() < 0.5 and kind != "dflash2" else VOCAB
    block, from_anchor = int(rng.integers(3, 9)), bool(rng.random() < 0.5)
    settings: dict[str, Any] = {
        "transformer_layer_config": draw_layer(rng),
        "draft_vocab_size": rows,
        "block_size": block,
        "aux_hidden_state_layer_ids": ids,
        "mask_token_id": int(rng.integers(0, VOCAB)),
        "sliding_window_non_causal": bool(rng.random() < 0.5),
        "sample_from_anchor": from_anchor,
        "speculators_config": SpeculatorsConfig(
            algorithm=kind,
            proposal_methods=[
                GreedyTokenProposalConfig(speculative_tokens=block - (not from_anchor))
            ],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
    }
    if kind == "dspark":
        settings |= {
            "markov_rank": int(rng.choice([3, 6])),
            "markov_head_type": str(rng.choice(["vanilla", "gated", "rnn"])),
            "confidence_head_with_markov": bool(rng.random() < 0.5),
        }
        model = DSparkDraftModel(DSparkSpeculatorConfig(**settings))
    elif kind == "dflash2":
        settings |= {
            "conv_kernel_size": int(rng.integers(1, 4)),
            "conv_group_size": int(rng.choice([1, 4, SIZE])),
            "selector_rank": int(rng.choice([3, 6])),
            "selector_top_k": int(rng.choice([2, 5, VOCAB])),
        }
        model = DFlash2DraftModel(DFlash2SpeculatorConfig(**settings))
    else:
        model = DFlashDraftModel(DFlashSpeculatorConfig(**settings))
    model = model.to(dtype).eval()
    for name, part in model.named_parameters():
        is_norm = part.dim() == 1 and "bias" not in name
        drawn = rng.uniform(0.5, 1.5, part.shape) if is_norm else rng.standard_normal(part.shape)
        part.data.copy_(torch.from_numpy(drawn) * (1.0 if is_norm else part.shape[-1] ** -0.5))
    model.embed_tokens.weight.data *= SIZE**0.5
    if rows != VOCAB:
        kept = torch.from_numpy(rng.permutation(VOCAB)[:rows]).sort().values
        t2d = torch.zeros(VOCAB, dtype=torch.bool)
        t2d[kept] = True
        model.load_vocab_mappings(t2d, kept - torch.arange(rows))
    model.save_pretrained(folder)
    target = FakeTarget(rng, hidden_size=SIZE, vocab_size=VOCAB, dtype=dtype)
    target.table.weight.copy_(model.embed_tokens.weight)
    if rows == VOCAB:  # a head of the whole vocabulary is the target's and is not saved
        target.head.weight.copy_(model.lm_head.weight)
    return model, target


def run_theirs(
    model: Any, text: torch.Tensor, aux: list[torch.Tensor], anchor: int, patch: pytest.MonkeyPatch
) -> dict[str, torch.Tensor]:
    """Logits [R, V'] of the block at `anchor`, the confidence's [R] of DSpark, and DFlash2's
    candidates and their scores [R, C] after the text's own tokens."""
    seen: dict[str, torch.Tensor] = {}

    def keep(logits: torch.Tensor, targets: Any, *rest: Any, **options: Any) -> tuple[Any, dict]:
        seen["logits"] = logits[0]
        if len(rest) > 2 and rest[0] is not None:  # DSpark's, before the mask
            seen["confidence"] = rest[0][0]
        return torch.zeros(()), {}

    patch.setattr(dflash_core, "compute_metrics", keep)
    patch.setattr(dspark_core, "compute_metrics", keep)

    def keep_scores(*, unary_logits: torch.Tensor, **options: Any) -> tuple[torch.Tensor, dict]:
        seen["logits"], seen["scores"] = unary_logits[0], options["candidate_logits"][0]
        seen["candidates"] = options["training_candidate_ids"][0]
        return torch.zeros(()), {}

    patch.setattr(dflash2_core, "compute_metrics", keep_scores)
    n = len(text)
    mask = torch.zeros(1, n)
    mask[0, anchor] = 1
    model(
        torch.cat(aux, -1)[None],
        text[None],
        mask,
        torch.zeros(1, n, SIZE, dtype=model.dtype),
        torch.zeros(1, n, dtype=torch.int64),
        max_anchors=1,
    )
    return seen


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("kind", ["dflash", "dspark", "dflash2"])
@pytest.mark.parametrize("seed", range(NUM_CONFIGS))
def test_blocks_equal_theirs(
    tmp_path: Path, kind: str, seed: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Logits of every draft of a whole block, and DSpark's estimates, behind a context whose keys
    were written in two parts."""
    rng = np.random.default_rng([51, seed, ("dflash", "dspark", "dflash2").index(kind)])
    model, target = draw_model(rng, tmp_path / "d", kind, dtype)
    size, anchor = model.block_size, int(rng.integers(2, 14))
    text = torch.from_numpy(rng.integers(0, VOCAB, anchor + 2 * size))
    aux = [(matrix(rng, len(text), SIZE) * 5).to(dtype) for _ in model.target_layer_ids]
    theirs = run_theirs(model, text, aux, anchor, monkeypatch)

    head = load(tmp_path / "d", kind, target)
    assert head.spec.aux_layer_ids == tuple(model.target_layer_ids)
    k = head.config.most_drafts
    paged = PagedRows(head, anchor + size)  # type: ignore[arg-type]
    before = [states[:anchor] for states in aux]
    features = head.context_features(target_step(before[0], before))
    cut = int(rng.integers(1, anchor))
    head.write_context(paged.rows(text[:cut], 0), features[:cut], paged.caches)
    head.write_context(paged.rows(text[cut:anchor], cut), features[cut:], paged.caches)
    block = torch.full((size,), model.mask_token_id)
    block[0] = text[anchor]
    states = head.draft_block(paged.rows(block, anchor), paged.caches)
    wanted = theirs["logits"][-k:]
    close = CLOSE if dtype is torch.float64 else CLOSE_IN_FLOAT32
    if kind == "dflash2":
        close = CLOSE_WITH_CONVOLUTIONS
    if kind != "dspark":
        torch.testing.assert_close(head.compute_logits(states[-k:]), wanted, **close)
    if kind == "dflash2":
        candidates = head.candidates(states[None, -k:])
        for i, ids in enumerate(theirs["candidates"][-k:]):
            # The last one is the training target where the best do not have it.
            ours = head.candidate_logits(candidates, i, text[anchor + i][None])[0, ids[:-1]]
            torch.testing.assert_close(ours, theirs["scores"][-k:][i, :-1], **close)
    if kind != "dspark":
        return
    found = []

    def follow_the_text(columns: torch.Tensor, index: int) -> tuple[torch.Tensor, None]:
        found.append(columns[0])
        return text[anchor + 1 + index][None], None

    list(head.in_turn(states[None], text[anchor][None], k, follow_the_text))
    torch.testing.assert_close(torch.stack(found), wanted, **close)
    estimates = head.acceptance(states[-k:], text[anchor : anchor + k])
    torch.testing.assert_close(estimates, theirs["confidence"][-k:].sigmoid(), **close)
