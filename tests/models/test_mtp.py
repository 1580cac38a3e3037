"""MTP heads compute their published definitions: one step, and a whole chain of drafts."""

import dataclasses
import functools
import json
import random
from itertools import product
from pathlib import Path

import pytest
import torch
from deepseek_oracle import deepseek_config, make_deepseek
from gemma4_oracle import HeadAsTarget, PagedRun, load
from grids import slow_unless
from mtp_folders import KINDS, qwen_config, random_config, write_mtp
from mtp_oracle import PlainMTP
from quantised_reference import dequantised, rounded, to_transformers_fp8
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DeepseekV3ForCausalLM
from transformers.modeling_layers import MtpModel

from hydraspec.errors import CheckpointError, ConfigurationError
from hydraspec.models import TargetModel
from hydraspec.models.mtp.head import MTPHead
from hydraspec.models.mtp.loading import load_mtp
from hydraspec.types import EncodedRows

# Share of the logit range. All is float64; the rotary frequencies are float32 on both sides, summed
# in another order where YaRN blends them.
TOLERANCE = 1e-4
NUM_SHAPES, NUM_QUICK = 24, 12


@dataclasses.dataclass
class Setting:
    target: TargetModel
    head: MTPHead
    plain: PlainMTP
    k: int


def make(
    kind: str, folder: Path, config: dict, num_mtp: int, k: int, seed: int, **layout: bool
) -> Setting:
    base, drafter = write_mtp(folder, kind, config, num_mtp, seed)
    target = load(base, torch.float64)
    head = load_mtp(str(drafter), weights="checkpoint", target=target, num_drafts=k, seed=0)
    return Setting(target, head, PlainMTP.read(drafter, kind, base), k)


def drafts_and_logits(
    setting: Setting, texts: list[list[int]], states: list[Tensor], seed: int
) -> list[tuple[list[int], list[Tensor]]]:
    """Per request its drafts and their logits, over a cache that is NaN where nothing was written.

    Step 0 goes through the rows in chunks, as a chunked prefill does.
    """
    head, draw = setting.head, random.Random(seed)
    run = PagedRun(
        HeadAsTarget(head, head.target.dtype), len(texts), draw.choice([1, 4, 16]), seed=seed
    )  # type: ignore[arg-type]
    newest: dict[int, Tensor] = {}
    with torch.inference_mode():
        while any(run.lengths[r] < len(s) for r, s in enumerate(states)):
            starts = list(run.lengths)
            counts = {
                r: min(draw.choice([1, 3, 8]), len(s) - starts[r])
                for r, s in enumerate(states)
                if starts[r] < len(s)
            }
            batch = run.batch({r: texts[r][starts[r] + 1 :][:n] for r, n in counts.items()})
            hidden = torch.cat([states[r][starts[r] :][: counts[r]] for r in batch.requests])
            out, feedback = head.forward(batch, hidden, run.caches, step=0)  # type: ignore[arg-type]
            assert out is feedback  # every layout feeds back what it scores
            for r, end in zip(batch.requests, batch.ends, strict=True):
                newest[r] = out[end - 1]
        found: list[tuple[list[int], list[Tensor]]] = [([], []) for _ in texts]
        for step in range(setting.k):
            state = torch.stack([newest[r] for r in range(len(texts))])
            logits, tokens = head.compute_logits(state), head.greedy_tokens(state)
            for r, (drafts, scores) in enumerate(found):
                scores.append(logits[r])
                drafts.append(int(tokens[r]))
            if step + 1 < setting.k:
                batch = run.batch({r: [found[r][0][-1]] for r in range(len(texts))})
                hidden = torch.stack([newest[r] for r in batch.requests])
                out, _ = head.forward(batch, hidden, run.caches, step=step + 1)  # type: ignore[arg-type]
                newest = dict(zip(batch.requests, out, strict=True))
    return found


def texts_and_states(setting: Setting, seed: int) -> tuple[list[list[int]], list[Tensor]]:
    draw = random.Random(seed)
    lengths = [2, draw.randint(3, 9), draw.randint(10, 30)]
    texts = [[draw.randrange(setting.target.vocab_size) for _ in range(n)] for n in lengths]
    torch.manual_seed(seed)
    return texts, [torch.randn(n - 1, setting.target.hidden_size).double() for n in lengths]


def worst(setting: Setting, seed: int) -> float:
    """The largest difference between our logits and the definition's, as a share of their range."""
    texts, states = texts_and_states(setting, seed)
    apart = 0.0
    found = drafts_and_logits(setting, texts, states, seed)
    for text, state, (drafts, scores) in zip(texts, states, found, strict=True):
        expected, logits = setting.plain.chain(state, text, setting.k)
        for ours, theirs in zip(scores, logits, strict=True):
            apart = max(apart, float((ours - theirs).abs().max() / (theirs.max() - theirs.min())))
        assert apart > TOLERANCE or drafts == expected
    return apart


@pytest.mark.parametrize(
    ("kind", "seed"),
    slow_unless(lambda _, seed: seed < NUM_QUICK, product(KINDS, range(NUM_SHAPES))),
)
def test_chains_of_random_shapes(kind: str, seed: int, tmp_path: Path) -> None:
    """One to three layers taking turns, K from one to six, several requests in one batch."""
    draw = random.Random(seed)
    num_mtp = draw.choice([1, 1, 2, 3])
    k = draw.choice([1, num_mtp, 2 * num_mtp, min(num_mtp, 2)])
    setting = make(kind, tmp_path, random_config(kind, seed), num_mtp, k, seed)
    assert worst(setting, seed) <= TOLERANCE


@pytest.mark.parametrize("seed", range(4))
def test_layers_in_blocks_of_fp8(seed: int, tmp_path: Path) -> None:
    """They round as their target's do, whose config they share; their own projection is in float,
    as in the release. Without YaRN, whose frequencies differ in the last bit: a rounding step."""
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    base, _ = write_mtp(tmp_path, "deepseek", random_config("deepseek", seed) | rope, 2, seed)
    plain = PlainMTP.read(base, "deepseek")
    quantised = to_transformers_fp8(base, [(16, 16), (128, 128)][seed % 2])
    for i, weights in enumerate(plain.layers):
        prefix = f"model.layers.{plain.config['num_hidden_layers'] + i}."
        for module in (name for name in quantised.modules if name.startswith(prefix)):
            name = f"{module.removeprefix(prefix)}.weight"
            weights[name] = dequantised(quantised, module, weights[name].shape[1])
        weights.rounding = functools.partial(rounded, scheme=quantised.scheme)
    target = load(base, torch.float64)
    head = load_mtp(str(base), weights="checkpoint", target=target, num_drafts=2, seed=0)
    assert worst(Setting(target, head, plain, 2), seed) <= 1e-9


def small(kind: str) -> dict:
    return deepseek_config() if kind == "deepseek" else qwen_config()


@pytest.mark.parametrize("kind", KINDS)
def test_the_other_order_of_concatenation_fails(kind: str, tmp_path: Path) -> None:
    setting = make(kind, tmp_path, small(kind), 1, 2, 0)
    assert worst(setting, 0) <= TOLERANCE
    for layer in setting.head.layers:
        layer.order = -layer.order
    assert worst(setting, 0) > 100 * TOLERANCE


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_position_reads_no_token(kind: str, tmp_path: Path) -> None:
    """DeepSeek's and MiMo's row at position 0 sees zeros instead of the embedding of token 1."""
    setting = make(kind, tmp_path, small(kind), 1, 1, 0)
    states = [torch.randn(1, 32).double()]
    one, other = ([[5, token]] for token in (6, 7))
    first = drafts_and_logits(setting, one, states, 0)[0][1][0]
    second = drafts_and_logits(setting, other, states, 0)[0][1][0]
    assert torch.equal(first, second) == (kind != "speculators")
    # Later rows do read theirs.
    states = [torch.randn(2, 32).double()]
    one, other = ([[5, 6, token]] for token in (6, 7))
    first = drafts_and_logits(setting, one, states, 0)[0][1][0]
    second = drafts_and_logits(setting, other, states, 0)[0][1][0]
    assert not torch.equal(first, second)


def test_layers_take_turns_each_over_its_own_cache(tmp_path: Path) -> None:
    """With the second layer made the first's twin, two layers draft what one would."""
    setting = make("mimo", tmp_path, qwen_config(), 2, 4, 0)
    texts, states = texts_and_states(setting, 1)
    apart = drafts_and_logits(setting, texts, states, 1)
    setting.plain.layers[1] = setting.plain.layers[0]
    setting.head.layers[1] = setting.head.layers[0]
    assert worst(setting, 1) <= TOLERANCE
    twins = drafts_and_logits(setting, texts, states, 1)
    assert torch.equal(apart[2][1][0], twins[2][1][0])
    assert not torch.allclose(apart[2][1][1], twins[2][1][1])


def test_transformers_agrees_but_for_the_first_position(tmp_path: Path) -> None:
    """Its MtpModel keeps the first embedding, and counts positions from 1, which turns nothing."""
    base, _ = write_mtp(tmp_path, "deepseek", deepseek_config(), 1, 3)
    oracle = DeepseekV3ForCausalLM.from_pretrained(base).eval()
    # It finds MTP layers by this pattern, which names the released model's layer 61.
    oracle._keys_to_ignore_on_load_unexpected = [r"model\.layers\.3.*"]
    theirs = MtpModel.from_pretrained(oracle).eval()
    target = load(base, torch.float32)
    head = load_mtp(str(base), weights="checkpoint", target=target, num_drafts=1, seed=0)
    layout = dataclasses.replace(head.config.layout, blanks_first_position=False)
    head.config = dataclasses.replace(head.config, layout=layout)
    text = [random.Random(0).randrange(96) for _ in range(12)]
    with torch.no_grad():
        hidden = oracle.model(torch.tensor([text[:-1]])).last_hidden_state
        positions = torch.arange(1, len(text))[None]
        _, logits, _ = theirs(
            input_ids=torch.tensor([text[1:]]),
            last_hidden_states=hidden,
            attention_mask=torch.ones_like(positions),
            position_ids=positions,
            mtp_cache=None,
        )
    ours = drafts_and_logits(Setting(target, head, None, 1), [text], [hidden[0]], 0)[0][1][0]  # type: ignore[arg-type]
    expected = logits[0, 0]
    assert (ours - expected).abs().max() <= TOLERANCE * (expected.max() - expected.min())


@pytest.mark.filterwarnings("ignore")  # of third parties
@pytest.mark.parametrize("seed", range(20))
def test_the_speculators_package_agrees(seed: int, tmp_path: Path) -> None:
    """Its class is for training: later steps are teacher-forced there, so one step is compared."""
    pytest.importorskip("speculators", reason="runs in an environment of its own: make test-oracle")
    from speculators import SpeculatorsConfig, VerifierConfig
    from speculators.models.mtp import MTPDraftModel, MTPSpeculatorConfig
    from speculators.proposals.greedy import GreedyTokenProposalConfig

    setting = make("speculators", tmp_path, random_config("speculators", seed), 1, 1, seed)
    layer = json.loads((tmp_path / "drafter" / "config.json").read_text())
    config = MTPSpeculatorConfig(
        transformer_layer_config=layer["transformer_layer_config"],
        speculators_config=SpeculatorsConfig(
            algorithm="mtp",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=1)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
    )
    config.transformer_layer_config._attn_implementation = "eager"
    theirs = MTPDraftModel(config).double().eval()
    loaded = theirs.load_state_dict(
        load_file(tmp_path / "drafter" / "model.safetensors"), strict=False
    )
    assert not loaded.unexpected_keys
    theirs.embed_tokens.weight.data.copy_(setting.target.table.weight)
    theirs.lm_head.weight.data.copy_(setting.target.head.weight)
    texts, states = texts_and_states(setting, seed)
    found = drafts_and_logits(setting, texts, states, seed)
    for text, state, (_, scores) in zip(texts, states, found, strict=True):
        # It leaves room for a target token and a state behind the row that is compared.
        tokens, hidden = torch.tensor([[*text, 0]]), torch.nn.functional.pad(state, (0, 0, 0, 2))
        with torch.no_grad():
            expected = theirs(input_ids=tokens, hidden_states=hidden[None])[0][0][0, -1]
        assert (scores[0] - expected).abs().max() <= TOLERANCE * (expected.max() - expected.min())


# ------------------------------------------------------------------ refusals


def refused(folder: Path, target: TargetModel, k: int = 1) -> str:
    with pytest.raises((CheckpointError, ConfigurationError)) as error:
        load_mtp(str(folder), weights="checkpoint", target=target, num_drafts=k, seed=0)
    return str(error.value)


def test_a_release_that_dropped_its_mtp_weights_is_named(tmp_path: Path) -> None:
    """transformers' own save_pretrained does this: the config announces what the file lacks."""
    make_deepseek(deepseek_config(), 0).save_pretrained(tmp_path)
    message = refused(tmp_path, load(tmp_path))
    assert "holds no MTP weights" in message
    assert "model.layers.3.*" in message
    assert message.count("\n") == 0


def test_a_partial_layer_is_named(tmp_path: Path) -> None:
    base, _ = write_mtp(tmp_path, "deepseek", deepseek_config(), 1, 0)
    tensors = load_file(base / "model.safetensors")
    del tensors["model.layers.3.eh_proj.weight"]
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    assert "missing tensors: layers.3.eh_proj.weight" in refused(base, load(base))


@pytest.mark.parametrize("k", [3, 5])
def test_k_that_does_not_go_with_the_layers_names_both(k: int, tmp_path: Path) -> None:
    base, _ = write_mtp(tmp_path, "mimo", qwen_config(), 2, 0)
    message = refused(base, load(base), k)
    assert f"method.num_speculative_tokens={k}" in message
    assert "2 MTP layers" in message


def test_layers_of_another_target_name_both_sizes(tmp_path: Path) -> None:
    base, _ = write_mtp(tmp_path / "a", "mimo", qwen_config(), 1, 0)
    other, _ = write_mtp(tmp_path / "b", "mimo", qwen_config(hidden_size=40, head_dim=10), 1, 0)
    message = refused(other, load(base))
    assert "hidden_size is 40 there and 32 in the target" in message


def test_the_spec_says_what_is_shared(tmp_path: Path) -> None:
    head = make("deepseek", tmp_path, deepseek_config(), 1, 1, 0).head
    spec = head.spec
    assert spec.shares_embedding
    assert spec.shares_head
    assert (spec.feedback, spec.position_mode, spec.kv_mode) == ("post_norm", "advance", "own")
    assert "DeepSeek-V3" in spec.format


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_images_read_what_stands_for_their_next_token(kind: str, tmp_path: Path) -> None:
    """An encoder's output that equals a token's embedding makes no difference from that token."""
    setting = make(kind, tmp_path, random_config(kind, 1), 1, 1, 1)
    (_, text, _), (_, state, _) = texts_and_states(setting, 1)
    read, other = text[1:], [*text[1:]]
    other[2] = (read[2] + 1) % setting.target.vocab_size
    found = []
    for tokens in (read, other):
        run = PagedRun(HeadAsTarget(setting.head, setting.target.dtype), 1)  # type: ignore[arg-type]
        batch = run.batch({0: tokens})
        if tokens is other:
            states = setting.target.embed(torch.tensor(read[2:3]))
            batch.encoded = EncodedRows(rows=torch.tensor([2]), states=states)
        with torch.inference_mode():
            found.append(setting.head.forward(batch, state, run.caches, step=0)[0])  # type: ignore[arg-type]
    assert torch.equal(*found)
