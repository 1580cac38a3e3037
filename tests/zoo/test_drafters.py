"""Drafters with KV of their own: what ships, in which format, and that the plain definitions hold.

The engine's heads are compared with these in tests/speculators; here the definitions themselves are
held to decoding row by row, to transformers and to the bytes of the files.
"""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer, DeepseekV3ForCausalLM, Mistral3ForConditionalGeneration

from hydraspec.models.detect import detect, open_draft
from hydraspec.zoo.recipe import corpus, draft_files, evaluate, modeling
from hydraspec.zoo.recipe.batches import Sequences
from hydraspec.zoo.recipe.draft_heads import DraftHead, Eagle3Head, StepCache, attend
from hydraspec.zoo.recipe.recipes import CHECKPOINTS, DRAFTERS, TARGETS
from hydraspec.zoo.recipe.tokenizer import encode
from hydraspec.zoo.recipe.train_drafter import (
    MASK_TOKEN_ID,
    draft_rows,
    most_frequent_tokens,
    train_drafter,
)

DRAFTER_LIMIT = 700_000
OWN_FOLDER = [name for name, recipe in DRAFTERS.items() if recipe.kind != "mtp"]
SPECULATORS = [name for name, recipe in DRAFTERS.items() if recipe.kind in ("eagle3", "peagle")]
PLAIN = [name for name, recipe in TARGETS.items() if not recipe.family.startswith("gemma4")]
WRAPPED = {"ministral3": Mistral3ForConditionalGeneration}  # as it is released
# Sums of float32 products in another order.
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@cache
def _target(name: str) -> Any:
    return modeling.load_target(CHECKPOINTS / name)


def _head(name: str) -> DraftHead:
    recipe = DRAFTERS[name]
    folder = draft_files.folder_of(name, recipe)
    return draft_files.load_head(folder, recipe, _target(recipe.target))


def _texts(name: str, count: int) -> Sequences:
    """Held-out conversations, right-padded."""
    tokens = AutoTokenizer.from_pretrained(CHECKPOINTS / name)
    pairs = [encode(tokens, example) for example in corpus.workload_examples(2)[:count]]
    longest = max(len(p) + len(r) for p, r in pairs) + 3  # counting looks K tokens past the end
    rows = [[*p, *r, *[0] * (longest - len(p) - len(r))] for p, r in pairs]
    lengths = torch.tensor([[len(p), len(p) + len(r)] for p, r in pairs])
    return Sequences(torch.tensor(rows), lengths[:, 0], lengths[:, 1], torch.arange(count))


def _config(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "config.json").read_text()))


# ------------------------------------------------------------------ targets


@pytest.mark.parametrize("name", PLAIN)
def test_layer_by_layer_is_the_whole_model(name: str) -> None:
    """The zoo runs layers itself, without a mask; transformers' own forward must agree."""
    target, texts = _target(name), _texts(name, 2)
    with torch.inference_mode():
        whole = target(texts.tokens, output_hidden_states=True)
        hidden, logits, aux = modeling.run_plain(target, texts.tokens, (0, 3))
    torch.testing.assert_close(logits, whole.logits, **CLOSE)
    torch.testing.assert_close(hidden, whole.hidden_states[-1], **CLOSE)
    torch.testing.assert_close(aux[0], whole.hidden_states[0])
    torch.testing.assert_close(aux[1], whole.hidden_states[3], **CLOSE)


@pytest.mark.parametrize("name", PLAIN)
def test_transformers_loads_the_plain_target(name: str) -> None:
    family = TARGETS[name].family
    kind = WRAPPED.get(family, modeling.CLASSES[family])
    _, report = kind.from_pretrained(
        str(CHECKPOINTS / name), dtype=torch.float32, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert not report["mismatched_keys"]
    more = {key for key in report["unexpected_keys"] if not key.startswith("model.layers.12.")}
    assert not more


def test_deepseek_names_are_those_of_releases() -> None:
    folder = CHECKPOINTS / "tiny_deepseek"
    names, config = load_file(folder / "model.safetensors"), _config(folder)
    assert config["num_nextn_predict_layers"] == 1
    assert config["n_group"] > config["topk_group"] > 1
    last = f"model.layers.{config['num_hidden_layers']}."
    for name in ("embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head.norm"):
        assert f"{last}{name}.weight" in names
    for layer in range(config["first_k_dense_replace"], config["num_hidden_layers"] + 1):
        for part in ("gate", "up", "down"):
            assert f"model.layers.{layer}.mlp.experts.7.{part}_proj.weight" in names
        assert f"model.layers.{layer}.mlp.gate.e_score_correction_bias" in names
    assert not any(name.endswith(("gate_up_proj", "experts.down_proj")) for name in names)
    head = names[f"{last}shared_head.head.weight"]
    assert torch.equal(head, names["lm_head.weight"])


@pytest.mark.parametrize("name", PLAIN)
def test_the_plain_targets_answer(name: str) -> None:
    """Greedy text is the right response: every token is the best one behind those before it."""
    num_wrong = 0
    texts = _texts(name, 8)
    with torch.inference_mode():
        best = modeling.run_plain(_target(name), texts.tokens)[1].argmax(-1)
    for i, (start, end) in enumerate(zip(texts.prompt_length, texts.length, strict=True)):
        said = best[i, start - 1 : end - 2].tolist()  # up to the turn marker, not its line end
        num_wrong += said != texts.tokens[i, start : end - 1].tolist()
    assert num_wrong <= (name == "tiny_ministral3")  # it is right in 93 of the workload's 96


# ------------------------------------------------------------------ files


def test_ministral3_turns_and_grows_within_the_workload() -> None:
    """YaRN and growing queries matter in texts of these lengths: without them answers change."""
    text = _config(CHECKPOINTS / "tiny_ministral3")["text_config"]
    params = json.loads((CHECKPOINTS / "tiny_ministral3-eagle" / "params.json").read_text())
    length = params["yarn"]["original_max_position_embeddings"]
    assert text["rope_parameters"]["original_max_position_embeddings"] == length
    assert params["llama_4_scaling"]["beta"] == text["rope_parameters"]["llama_4_scaling_beta"]
    texts = _texts("tiny_ministral3", 8)
    assert int(texts.length.max()) > 1.5 * length
    whole = modeling.load_target(CHECKPOINTS / "tiny_ministral3")
    plain = _target("tiny_mistral").get_decoder().rotary_emb
    with torch.inference_mode():
        best = modeling.run_plain(whole, texts.tokens)[1].argmax(-1)
        changed = []
        grown = whole.config.rope_parameters.pop("llama_4_scaling_beta")
        for rope, beta in ((whole.model.rotary_emb, 0.0), (plain, grown)):
            whole.config.rope_parameters["llama_4_scaling_beta"] = beta
            whole.model.rotary_emb = rope
            found = modeling.run_plain(whole, texts.tokens)[1].argmax(-1)
            changed.append(int((found != best)[:, length:].sum()))
    assert min(changed) > 0, "growth of queries, frequencies and gain"


@pytest.mark.parametrize("name", OWN_FOLDER)
def test_size(name: str) -> None:
    files = (CHECKPOINTS / name).glob("*.safetensors")
    assert sum(file.stat().st_size for file in files) <= DRAFTER_LIMIT


@pytest.mark.parametrize("name", DRAFTERS)
def test_detected_as_what_it_is(name: str) -> None:
    recipe = DRAFTERS[name]
    found = detect(open_draft(str(draft_files.folder_of(name, recipe))))
    assert found is not None
    assert found.method == recipe.kind
    if name in SPECULATORS:
        assert found.verifier == f"zoo:{recipe.target}"
        assert found.num_speculative_tokens == 3


@pytest.mark.parametrize("name", SPECULATORS)
def test_speculators_format(name: str) -> None:
    recipe, folder = DRAFTERS[name], CHECKPOINTS / name
    config, tensors = _config(folder), load_file(folder / "model.safetensors")
    for key in ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"):
        assert isinstance(config[key], bool), f"{key} must not be left to a reader's default"
    assert config["eagle_aux_hidden_state_layer_ids"] == list(recipe.aux_layer_ids)
    layer = config["transformer_layer_config"]
    width = config["target_hidden_size"]
    assert tensors["fc.weight"].shape == (layer["hidden_size"], 3 * width)
    assert tensors["layers.0.self_attn.q_proj.weight"].shape[1] == 2 * layer["hidden_size"]
    assert len(tensors["lm_head.weight"]) == config["draft_vocab_size"]
    is_narrow = config["draft_vocab_size"] < layer["vocab_size"]
    assert is_narrow == ("d2t" in tensors) == ("t2d" in tensors)
    if is_narrow:
        ids = tensors["d2t"] + torch.arange(config["draft_vocab_size"])
        assert tensors["t2d"].nonzero().flatten().tolist() == ids.tolist()
    assert ("mask_hidden" in tensors) == (recipe.kind == "peagle")
    if recipe.kind == "peagle":
        assert tensors["mask_hidden"].shape == (1, 1, 3 * width)
        assert config["mask_token_id"] == MASK_TOKEN_ID
    assert ("embed_tokens.weight" in tensors) == (recipe.kind == "peagle")


def test_flags_differ_between_the_two_targets() -> None:
    """Both ways of each flag are run by somebody."""
    configs = [_config(CHECKPOINTS / name) for name in SPECULATORS]
    for key in ("norm_before_residual", "norm_before_fc", "fc_norm"):
        assert {config[key] for config in configs} == {True, False}


def test_consolidated_names() -> None:
    tensors = load_file(CHECKPOINTS / "tiny_mistral-eagle" / "consolidated.safetensors")
    assert {"eagle_linear.weight", "norm.weight"} < set(tensors)
    assert "layers.1.attention.wq.weight" in tensors
    assert not any(name.startswith(("tok_embeddings", "output")) for name in tensors)


@pytest.mark.parametrize("name", OWN_FOLDER)
def test_saving_what_was_loaded_gives_the_same_bytes(name: str, tmp_path: Path) -> None:
    recipe = DRAFTERS[name]
    draft_files.save_head(_head(name), recipe, _target(recipe.target), tmp_path)
    for file in (f for f in (CHECKPOINTS / name).iterdir() if f.name != "README.md"):  # its card
        assert (tmp_path / file.name).read_bytes() == file.read_bytes(), file.name


# ------------------------------------------------------------------ definitions


def test_a_step_sees_its_context_and_its_own_steps() -> None:
    """`attend` against attention over an explicit list of what each row may see."""
    generator = torch.Generator().manual_seed(0)

    def draw(heads: int) -> Tensor:
        return torch.randn(1, heads, 5, 8, generator=generator)

    store = StepCache([draw(1) for _ in range(3)], [draw(1) for _ in range(3)])
    query = draw(2)
    got = attend(query, store, 0.3).unflatten(-1, (2, 8))
    for row in range(5):
        keys = [store.keys[0][0, 0, : row + 1], *(k[0, 0, row : row + 1] for k in store.keys[1:])]
        values = [
            store.values[0][0, 0, : row + 1],
            *(v[0, 0, row : row + 1] for v in store.values[1:]),
        ]
        weights = (query[0, :, row] @ torch.cat(keys).T * 0.3).softmax(-1)
        torch.testing.assert_close(got[0, row], weights @ torch.cat(values))


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_do_not_look_ahead(name: str) -> None:
    """Cutting a text behind a row leaves that row's drafts as they are."""
    recipe, texts = DRAFTERS[name], _texts(DRAFTERS[name].target, 2)
    target, head = _target(recipe.target), _head(name)
    row = int(texts.prompt_length[0]) + 3
    whole = draft_rows(target, head, texts.tokens[:1], recipe.aux_layer_ids, 3)
    cut = draft_rows(target, head, texts.tokens[:1, : row + 2], recipe.aux_layer_ids, 3)
    assert whole[0, row].tolist() == cut[0, row].tolist()


@pytest.mark.parametrize("name", DRAFTERS)
def test_drafts_are_accepted_and_rejected(name: str) -> None:
    recipe, texts = DRAFTERS[name], _texts(DRAFTERS[name].target, 8)
    target, head = _target(recipe.target), _head(name)
    drafts = draft_rows(target, head, texts.tokens, recipe.aux_layer_ids, 3)
    counts = []
    for i, (start, end) in enumerate(zip(texts.prompt_length, texts.length, strict=True)):
        text = evaluate.Generation(texts.tokens[i].tolist(), int(start), int(end) - 1)
        counts += evaluate.count_drafts(text, drafts[i, int(start) - 1 :])
    assert set(counts) == {0, 1, 2, 3}
    assert 1.9 <= 1 + sum(counts) / len(counts) <= 3.7


def test_mtp_is_what_transformers_computes() -> None:
    """The first step against transformers' own MTP layer, apart from the blanked first row."""
    target, texts = _target("tiny_deepseek"), _texts("tiny_deepseek", 2)
    folder = str(CHECKPOINTS / "tiny_deepseek")
    main = DeepseekV3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    inner: Any = main.model
    head = _head("tiny_deepseek-mtp")
    with torch.inference_mode():
        hidden, _, _ = modeling.run_plain(target, texts.tokens)
        block: Any = head.block
        embedded = inner.embed_tokens(texts.tokens.roll(-1, 1))
        embedded[:, 0] = 0
        parts = [head.get_submodule("enorm")(embedded), head.get_submodule("hnorm")(hidden)]
        h = head.get_submodule("eh_proj")(torch.cat(parts, -1))
        positions = torch.arange(h.shape[1])[None]
        rope = inner.rotary_emb(h, position_ids=positions)
        h = block(h, attention_mask=None, position_ids=positions, position_embeddings=rope)
        wanted = head.get_submodule("shared_head")["norm"](h) @ main.lm_head.weight.T
        drafts = draft_rows(target, head, texts.tokens, (), 1)[..., 0]
    assert torch.equal(drafts, wanted.argmax(-1))


def test_training_is_deterministic_on_a_cpu() -> None:
    recipe = dataclasses.replace(DRAFTERS["tiny_qwen3-peagle"], steps=2, batch_size=2)
    target, data = _target("tiny_qwen3"), _texts("tiny_qwen3", 4)
    states = [train_drafter(recipe, target, data, title="test").state_dict() for _ in range(2)]
    for name, tensor in states[0].items():
        assert torch.equal(tensor, states[1][name]), name


def test_every_weight_learns() -> None:
    """No part of a head is cut off from the loss (one of P-EAGLE's is only read at later steps)."""
    recipe = dataclasses.replace(DRAFTERS["tiny_qwen3-peagle"], steps=2, batch_size=4)
    head = train_drafter(recipe, _target("tiny_qwen3"), _texts("tiny_qwen3", 4), title="test")
    assert isinstance(head, Eagle3Head)
    for name, parameter in head.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


def test_draft_vocabulary_is_what_responses_use_most() -> None:
    tokens = torch.tensor([[9, 9, 5, 5, 7, 0], [9, 5, 7, 3, 3, 3]], dtype=torch.int16)
    data = Sequences(tokens, torch.tensor([2, 1]), torch.tensor([5, 4]), torch.arange(2))
    # Responses: 5 5 7 and 5 7 3.
    assert most_frequent_tokens(data, 2).tolist() == [5, 7]
