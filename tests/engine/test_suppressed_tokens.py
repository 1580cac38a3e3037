"""What generation_config.json suppresses is neither sampled nor drafted, by any drafter."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from graph_runs import (
    PAIRS,
    SHARING,
    Run,
    graph_config,
    make_graph_engine,
    run_requests,
    zoo_requests,
)

from hydraspec.config.schema import DraftSampling
from hydraspec.models.checkpoint.reader import resolve_folder

CASES = {
    "dense head": ("gemma4_mtp", PAIRS["gemma4_mtp"]),
    "centroid head": ("gemma4_mtp", SHARING),
    "narrow vocabulary": ("eagle3", PAIRS["eagle3"]),
    "target's head": ("mtp", PAIRS["mtp"]),
}
NUM_SUPPRESSED = 12


def tokens_of(run: Run) -> Counter[int]:
    """How often each was sampled or drafted."""
    found = Counter(token for tokens in run.tokens for token in tokens)
    found.update(token for steps in run.drafts.values() for step in steps for token in step)
    return found


@pytest.mark.parametrize("case", CASES)
def test_suppressed_tokens_occur_nowhere(case: str, tmp_path: Path) -> None:
    """The tokens that are said and drafted most, from the second run on. A greedy request and one
    that samples, its drafts too, each in separate steps: their code paths differ.
    """
    method, pair = CASES[case]
    config = graph_config(method, "none", pair=pair, draft_sampling=DraftSampling.probabilistic)
    requests = [zoo_requests(1, longest=20)[0], zoo_requests(2, temperature=1.5)[1]]
    said = tokens_of(run_requests(make_graph_engine(config, None), requests, concurrency=1))
    suppressed = [token for token, _ in said.most_common(NUM_SUPPRESSED)]
    for file in resolve_folder(config.target.checkpoint).iterdir():
        (tmp_path / file.name).symlink_to(file)
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"suppress_tokens": suppressed, "eos_token_id": 1})
    )
    config.target.checkpoint = str(tmp_path)
    run = run_requests(make_graph_engine(config, None), requests, concurrency=1)
    for steps in run.drafts.values():
        assert sum(len(step) for step in steps) > 5
    assert not tokens_of(run).keys() & set(suppressed)
