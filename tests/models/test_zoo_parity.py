"""The checkpoints that ship: our target and assistant against transformers on the same files."""

import pytest
import torch
from gemma4_oracle import (
    FULL,
    SLIDING,
    PagedRun,
    load_zoo,
    mend_assistant_config,
    oracle_logits,
    run_in_chunks,
)

from hydraspec.models.checkpoint.reader import ZOO
from hydraspec.models.gemma4.assistant import load_assistant
from hydraspec.zoo.recipe.modeling import load_assistant as load_zoo_assistant
from hydraspec.zoo.recipe.modeling import load_target

# Share of the logit range; measured at 1e-6 on files written in bfloat16 and run in float32.
TOLERANCE = 1e-5
NAMES = ["tiny_gemma4", "tiny_gemma4_e", "tiny_gemma4_moe", "tiny_gemma4_unified"]
LENGTH = 90  # beyond every window


@pytest.mark.parametrize("name", NAMES)
def test_target_and_assistant_match_transformers(name: str) -> None:
    # dtype at loading: .float() afterwards leaves the embedding scale rounded to bfloat16.
    oracle = load_target(ZOO / name)
    draw = torch.Generator().manual_seed(0)
    prompt = torch.randint(6, oracle.config.vocab_size, (LENGTH,), generator=draw).tolist()
    target = load_zoo(name)
    run = PagedRun(target, 1, block_size=16, max_len=LENGTH + 6)
    (logits,) = run_in_chunks(run, [prompt], 0)
    expected = oracle_logits(oracle, prompt)
    assert (logits - expected).abs().max() < TOLERANCE * (expected.max() - expected.min())

    mend_assistant_config()
    files = f"{name}-assistant"
    draft = load_zoo_assistant(ZOO / files)
    ours = load_assistant(f"zoo:{files}", weights="checkpoint", target=target, seed=0)
    token, hidden = torch.tensor([7]), torch.randn(1, target.hidden_size, generator=draw)
    lens = torch.tensor([LENGTH])
    with torch.inference_mode():
        context = ours.begin(lens - 1, lens, run.tables, LENGTH, run.caches)
        d, feedback = ours.step(context, token, hidden)
        scores, greedy = ours.compute_logits(d), ours.greedy_tokens(d)
        theirs = draft(
            inputs_embeds=torch.cat((target.embed(token), hidden), -1)[None],
            position_ids=(lens - 1)[None],
            shared_kv_states=run.shared_kv(0, LENGTH, SLIDING, FULL),
        )
    chosen = scores[0] > torch.finfo(scores.dtype).min
    span = theirs.logits.max() - theirs.logits.min()
    assert (scores[0] - theirs.logits[0, 0])[chosen].abs().max() < TOLERANCE * span
    state = theirs.last_hidden_state[0]
    assert (feedback - state).abs().max() < TOLERANCE * (state.max() - state.min())
    assert int(greedy) == int(theirs.logits.argmax())
