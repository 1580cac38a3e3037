"""The assistant: parity with transformers for one step, its centroid head, and what it must not
touch.
"""

from pathlib import Path

import pytest
import torch
from gemma4_oracle import (
    FULL,
    SLIDING,
    PagedRun,
    load,
    make_assistant,
    make_target,
    text_config,
)

from hydraspec.errors import CheckpointError
from hydraspec.models.gemma4.assistant import Gemma4Assistant, load_assistant

# float32 sums in another order, through two layers; outputs are of order one.
TOLERANCE = 2e-5

PROMPTS = [[5, 9, 2], [7, 1, 8, 2, 8, 1, 8, 2, 8, 4, 5, 9, 0, 4], list(range(3, 30))]
DRAFT = text_config(
    hidden_size=24,
    num_hidden_layers=3,
    layer_types=[SLIDING, SLIDING, FULL],
    attention_k_eq_v=True,
)
HEADS = {
    "dense": {},
    "centroids": {
        "use_ordered_embeddings": True,
        "num_centroids": 12,
        "centroid_intermediate_top_k": 3,
    },
}


def build(folder: Path, head: str, **draft: object) -> tuple[object, Gemma4Assistant, PagedRun]:
    """An oracle assistant, ours on the same file, and a target that has read PROMPTS."""
    make_target(text_config(attention_k_eq_v=True), 1).save_pretrained(folder / "target")
    oracle = make_assistant(DRAFT | draft, 2, backbone_hidden_size=32, **HEADS[head])
    oracle.save_pretrained(folder / "assistant")
    run = PagedRun(load(folder / "target"), 3, seed=4)
    target = run.target
    assistant = load_assistant(
        str(folder / "assistant"), weights="checkpoint", target=target, seed=0
    )
    return oracle, assistant, run


def assistant_of(folder: Path) -> Gemma4Assistant:
    """The assistant in a folder, beside the target in it."""
    return load_assistant(
        str(folder / "assistant"), weights="checkpoint", target=load(folder / "target"), seed=0
    )


def begin(assistant: Gemma4Assistant, run: PagedRun, slack: int = 5) -> object:
    lens = torch.tensor(run.lengths)
    longest = max(run.lengths) + slack
    return assistant.begin(lens - 1, lens, run.tables, longest, run.caches)


@pytest.mark.parametrize("head", HEADS)
def test_one_step_matches_transformers(head: str, tmp_path: Path) -> None:
    oracle, assistant, run = build(tmp_path, head)
    states = run.step(dict(enumerate(PROMPTS)))
    before = [None if c is None else c.clone() for c in run.caches]
    hidden = torch.stack([states[r][0][-1] for r in range(3)])
    tokens = torch.stack([states[r][1][-1].argmax() for r in range(3)])
    with torch.inference_mode():
        context = begin(assistant, run)
        d, feedback = assistant.step(context, tokens, hidden)
        logits, greedy = assistant.compute_logits(d), assistant.greedy_tokens(d)
        embedded = run.target.embed(tokens)
    assert torch.equal(greedy, logits.argmax(-1))
    for r, prompt in enumerate(PROMPTS):
        with torch.no_grad():
            expected = oracle(
                inputs_embeds=torch.cat((embedded[r], hidden[r]))[None, None],
                position_ids=torch.tensor([[len(prompt) - 1]]),
                shared_kv_states=run.shared_kv(r, len(prompt), SLIDING, FULL),
            )
        assert (feedback[r] - expected.last_hidden_state[0, 0]).abs().max() < TOLERANCE
        # transformers fills unselected tokens with the batch's smallest score - 1; only selected
        # ones compare.
        chosen = logits[r] > torch.finfo(logits.dtype).min
        assert chosen.sum() == (96 if head == "dense" else 3 * 8)
        assert (logits[r] - expected.logits[0, 0])[chosen].abs().max() < TOLERANCE
        assert int(greedy[r]) == int(expected.logits[0, 0].argmax())
    for old, new in zip(before, run.caches, strict=True):  # not one bit of the target's cache moved
        assert old is None or torch.equal(old.nan_to_num(7.0), new.nan_to_num(7.0))


def test_a_round_ignores_rejected_entries(tmp_path: Path) -> None:
    """Every step sees KV 0..p, so stale entries of rejected rows behind p change nothing."""
    tokens, hidden = torch.tensor([4, 5, 6]), torch.randn(3, 32)
    outputs = []
    for rejected in ([], [3, 1, 4]):
        _, assistant, run = build(tmp_path, "dense")
        run.frees = False
        run.step(dict(enumerate(PROMPTS)))
        lengths = list(run.lengths)
        if rejected:
            run.step(dict.fromkeys(range(3), rejected))
        run.lengths = lengths
        with torch.inference_mode():
            context, h, t = begin(assistant, run), hidden, tokens
            for _ in range(3):
                d, h = assistant.step(context, t, h)
                t = assistant.greedy_tokens(d)
                outputs.append(d)
    for clean, stale in zip(outputs[:3], outputs[3:], strict=True):
        assert torch.equal(clean, stale)


def test_the_last_owner_of_each_type_is_read(tmp_path: Path) -> None:
    _, assistant, _ = build(tmp_path, "dense")
    assert assistant.spec.kv_sources == (("sliding", 2), ("full", 3))
    assert assistant.spec.position_mode == "constant"
    assert assistant.spec.kv_mode == "target"


def test_shared_layers_are_no_source(tmp_path: Path) -> None:
    make_target(
        text_config(
            num_hidden_layers=6,
            layer_types=[SLIDING, FULL, SLIDING, FULL, SLIDING, FULL],
            num_kv_shared_layers=3,
            hidden_size_per_layer_input=4,
            vocab_size_per_layer_input=96,
        ),
        1,
    ).save_pretrained(tmp_path / "target")
    draft = DRAFT | {"attention_k_eq_v": False}
    make_assistant(draft, 2, backbone_hidden_size=32).save_pretrained(tmp_path / "assistant")
    assert assistant_of(tmp_path).spec.kv_sources == (("sliding", 2), ("full", 1))


MISMATCHES = {
    "hidden size": ({}, {"backbone_hidden_size": 40}, r"backbone_hidden_size\) is 40 .* and 32"),
    "vocabulary": (
        {"vocab_size": 64},
        {},
        "vocab_size is 64 in the assistant and 96 in the target",
    ),
    "head size": ({"head_dim": 8}, {}, "head_dim of sliding_attention layers is 8 .* and 16"),
    "KV heads": (
        {"num_global_key_value_heads": 2},
        {},
        "KV heads of full_attention layers is 2 .* 1",
    ),
    "no sliding layers": (
        {},
        {},
        "has sliding_attention layers and the target has none",
    ),
    "window": ({"sliding_window": 16}, {}, "sliding_window is 16 in the assistant and 8"),
}


@pytest.mark.parametrize("case", MISMATCHES)
def test_an_assistant_of_another_target_is_refused(case: str, tmp_path: Path) -> None:
    draft, top, message = MISMATCHES[case]
    kinds = {"layer_types": [FULL] * 4} if case == "no sliding layers" else {}
    make_target(text_config(attention_k_eq_v=True, **kinds), 1).save_pretrained(tmp_path / "target")
    top = {"backbone_hidden_size": 32} | top
    make_assistant(DRAFT | draft, 2, **top).save_pretrained(tmp_path / "assistant")
    with pytest.raises(CheckpointError, match=message):
        assistant_of(tmp_path)


def test_target_and_assistant_swapped(tmp_path: Path) -> None:
    build(tmp_path, "dense")
    with pytest.raises(CheckpointError, match=r"gemma4_assistant.*method\.checkpoint"):
        load(tmp_path / "assistant")
    with pytest.raises(CheckpointError, match=r"gemma4_text.*target\.checkpoint"):
        load_assistant(
            str(tmp_path / "target"),
            weights="checkpoint",
            target=load(tmp_path / "target"),
            seed=0,
        )
