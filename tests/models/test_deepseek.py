"""Our DeepSeek-V3 computes what transformers' DeepseekV3ForCausalLM computes, from a compressed
cache.
"""

import json
import random
from pathlib import Path

import pytest
import torch
from deepseek_oracle import (
    deepseek_config,
    deepseek_logits,
    make_deepseek,
    pack_experts,
    random_deepseek_config,
)
from gemma4_oracle import PagedRun, load, run_in_chunks
from safetensors.torch import load_file, save_file

from hydraspec.errors import CheckpointError
from hydraspec.models import load_target
from hydraspec.models.deepseek.config import read_deepseek_config

# Share of the logit range: float32 sums in another order (absorbed projections among them).
TOLERANCE = 1e-4
NUM_SHAPES = 36


def prompts_of(seed: int, vocab: int = 96) -> list[list[int]]:
    draw = random.Random(seed)
    lengths = [(1, 3), (7, 20), (21, 45)]
    return [[draw.randrange(vocab) for _ in range(draw.randint(*n))] for n in lengths]


def assert_near(ours: torch.Tensor, theirs: torch.Tensor, tolerance: float = TOLERANCE) -> None:
    assert (ours - theirs).abs().max() <= tolerance * (theirs.max() - theirs.min())


@pytest.mark.parametrize("seed", range(NUM_SHAPES))
def test_logits_of_random_shapes_in_chunks(seed: int, tmp_path: Path) -> None:
    """Prefill and decode mixed, through a cache that is NaN wherever nothing was written."""
    oracle = make_deepseek(random_deepseek_config(seed), seed)
    oracle.save_pretrained(tmp_path)
    if seed % 3 == 0:
        pack_experts(tmp_path)
    run = PagedRun(load(tmp_path), 3, block_size=random.Random(seed).choice([1, 4, 16]), seed=seed)
    run.slack = seed % 3 * 7
    prompts = prompts_of(seed)
    for prompt, logits in zip(prompts, run_in_chunks(run, prompts, seed), strict=True):
        assert_near(logits, deepseek_logits(oracle, prompt))


def test_the_random_shapes_cover_every_field() -> None:
    drawn = [random_deepseek_config(seed) for seed in range(NUM_SHAPES)]
    for field in ("norm_topk_prob", "rope_interleave", "attention_bias", "tie_word_embeddings"):
        assert 3 <= sum(config[field] for config in drawn) < NUM_SHAPES, field
    assert 5 < sum(config["q_lora_rank"] is None for config in drawn) < NUM_SHAPES
    assert any(config["first_k_dense_replace"] == 0 for config in drawn)
    dense = [c for c in drawn if c["first_k_dense_replace"] >= c["num_hidden_layers"]]
    assert 0 < len(dense) < NUM_SHAPES
    kinds = [config["rope_parameters"] for config in drawn]
    assert any("attention_factor" in kind for kind in kinds)
    assert any("mscale" in kind and kind.get("mscale_all_dim") == 0.5 for kind in kinds)


def test_a_token_caches_one_latent_and_one_rotary_key(tmp_path: Path) -> None:
    make_deepseek(deepseek_config(), 0).save_pretrained(tmp_path)
    (group,) = load(tmp_path).kv_groups(4)
    assert group.shape.page_row == (1, 16 + 8)
    assert group.layers == (0, 1, 2)


def test_greedy_tokens_match_generate(tmp_path: Path) -> None:
    oracle = make_deepseek(deepseek_config(), 5)
    oracle.generation_config.eos_token_id = None
    oracle.save_pretrained(tmp_path)
    prompt = prompts_of(5)[1]
    expected = oracle.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)
    run = PagedRun(load(tmp_path), 1)
    _, logits = run.step({0: prompt})[0]
    tokens = [*prompt, int(logits[-1].argmax())]
    while len(tokens) < len(prompt) + 24:
        _, logits = run.step({0: tokens[-1:]})[0]
        tokens.append(int(logits[-1].argmax()))
    assert tokens == expected[0].tolist()


def test_wide_and_narrow_types_stay_near(tmp_path: Path) -> None:
    """float64 folds norms as float32 does; bfloat16 keeps the reference's order of rounding."""
    oracle = make_deepseek(deepseek_config(), 3)
    oracle.save_pretrained(tmp_path)
    prompts = prompts_of(3)
    wide = run_in_chunks(PagedRun(load(tmp_path, torch.float64), 3), prompts, 3)
    near = run_in_chunks(PagedRun(load(tmp_path, torch.float32), 3), prompts, 3)
    for a, b in zip(wide, near, strict=True):
        assert_near(b, a)
    # Rounding to bfloat16 changes which experts near ties choose, so only most rows stay near.
    narrow = torch.cat(run_in_chunks(PagedRun(load(tmp_path, torch.bfloat16), 3), prompts, 3))
    exact = torch.cat(wide)
    off = (narrow - exact).abs().amax(-1) / (exact.max() - exact.min())
    assert off.median() < 0.05


@pytest.mark.parametrize("ids", [(0, 1, 2, 3), (3, 0), (2,)])
def test_aux_states_are_the_stream_after_so_many_layers(
    ids: tuple[int, ...], tmp_path: Path
) -> None:
    oracle = make_deepseek(deepseek_config(), 4)
    oracle.save_pretrained(tmp_path)
    seen: list[torch.Tensor] = []
    for layer in oracle.model.layers:
        layer.register_forward_pre_hook(lambda _, args: seen.append(args[0][0]))
    oracle.model.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0][0]))
    prompt = prompts_of(4)[1]
    deepseek_logits(oracle, prompt)
    run = PagedRun(load(tmp_path), 1)
    with torch.inference_mode():
        _, aux = run.target.forward(run.batch({0: prompt}), run.caches, ids)
    assert len(aux) == len(ids)
    for i, state in zip(ids, aux, strict=True):
        assert_near(state, seen[i])


def test_mtp_layers_in_the_file_are_left_to_the_drafter(tmp_path: Path) -> None:
    oracle = make_deepseek(deepseek_config(), 6)
    oracle.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.3.eh_proj.weight"] = torch.zeros(32, 64)
    tensors["model.layers.3.embed_tokens.weight"] = torch.zeros(96, 32)
    save_file(tensors, tmp_path / "model.safetensors")
    run = PagedRun(load(tmp_path), 1)
    prompt = prompts_of(6)[0]
    assert_near(run.step({0: prompt})[0][1], deepseek_logits(oracle, prompt))


def released_layout(config: dict) -> dict:
    """As released: rope_theta at the top, YaRN under rope_scaling with `type`."""
    rope = dict(config.pop("rope_parameters"))
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope | {"type": rope.pop("rope_type")}
    return config


def test_both_layouts_of_the_config_say_the_same() -> None:
    ours = read_deepseek_config(deepseek_config(), "x")
    released = read_deepseek_config(released_layout(deepseek_config()), "x")
    assert torch.equal(ours.rope.theta, released.rope.theta)
    assert (ours.rope.gain, ours.score_scale) == (released.rope.gain, released.score_scale)
    assert ours.score_scale != pytest.approx(20**-0.5)  # mscale_all_dim 1 sharpens the scores


def save(folder: Path, **changes: object) -> None:
    make_deepseek(deepseek_config(), 0).save_pretrained(folder)
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"kv_lora_rank": None}, ["kv_lora_rank is None", "at least 1"]),
        ({"n_group": 3}, ["n_group is 3", "divisor of n_routed_experts 8"]),
        ({"topk_group": 5}, ["topk_group is 5", "at most n_group 4"]),
        ({"num_experts_per_tok": 7}, ["num_experts_per_tok is 7", "at most the 4"]),
        ({"hidden_act": "gelu"}, ["hidden_act is 'gelu'", "silu"]),
        ({"scoring_func": "softmax"}, ["scoring_func is 'softmax'", "sigmoid"]),
        ({"qk_rope_head_dim": 7}, ["qk_rope_head_dim is 7", "even"]),
        ({"rope_parameters": {"rope_type": "longrope"}}, ["rope_parameters", "yarn"]),
        ({"num_hidden_layers": 4}, ["missing tensors: layers.3.input_layernorm.weight"]),
        (
            {"kv_lora_rank": 8},
            ["misshapen tensors: layers.0.self_attn.kv_a_layernorm.weight is [16]"],
        ),
        ({"n_routed_experts": 4, "n_group": 2}, ["surplus tensors: layers.1.mlp.experts.4"]),
    ],
)
def test_a_bad_checkpoint_is_named(changes: dict, words: list[str], tmp_path: Path) -> None:
    save(tmp_path, **changes)
    with pytest.raises(CheckpointError) as refused:
        load(tmp_path)
    for word in words:
        assert word in str(refused.value)


def test_suppressed_tokens_are_never_drawn_and_stops_are_read(tmp_path: Path) -> None:
    save(tmp_path)
    generation = {"suppress_tokens": [3, 95, 400], "eos_token_id": [1, 7]}
    (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    target = load(tmp_path)
    _, logits = PagedRun(target, 1).step({0: [1, 2]})[0]
    assert torch.isneginf(logits).nonzero()[:, 1].tolist() == [3, 95] * 2
    assert target.eos_token_ids == (1, 7)


def test_random_weights_need_no_tensors(tmp_path: Path) -> None:
    config = {"model_type": "deepseek_v3"} | released_layout(deepseek_config())
    (tmp_path / "config.json").write_text(json.dumps(config))
    target = load_target(
        str(tmp_path),
        weights="random",
        dtype=torch.float32,
        device=torch.device("cpu"),
        seed=1,
        max_model_len=None,
    )
    _, logits = PagedRun(target, 1).step({0: [1, 2, 3]})[0]
    assert 0.1 < logits.std() < 10
    assert target.memory_bytes() > 0
