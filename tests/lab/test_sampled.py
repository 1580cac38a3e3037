"""metrics.distribution: sampled outputs of both sides, compared after a run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import records
from checked_pages import check_page

import hydraspec
from hydraspec.cli.compose import plan
from hydraspec.config.schema import RunConfig
from hydraspec.errors import ConfigurationError
from hydraspec.lab import sampled
from hydraspec.metrics.lossless import MORE_VARIED, distribution_says, verdict_words
from hydraspec.types import Completion, Request, SamplingParams


class Sampler:
    """An engine whose tokens are drawn with a request's own stream; `first` is token 0's share."""

    def __init__(self, first: float, failing: str = "") -> None:
        self.info = SimpleNamespace(num_speculative_tokens=3)
        self.first, self.failing = first, failing
        self.seeds: list[int] = []

    def run(self, requests: Sequence[Request], *, concurrency: int | None) -> Iterator[Completion]:
        for request in requests:
            self.seeds.append(request.sampling.seed)
            rng = np.random.default_rng(request.sampling.seed)
            length = request.sampling.max_tokens
            yield records.completion(
                request.index,
                output_token_ids=[int(x) for x in rng.random(length) >= self.first],
                finish_reason="error" if request.category == self.failing else "length",
            )


def requests(temperature: float = 1.0) -> list[Request]:
    return [
        Request(
            index=i,
            id=f"r{i}",
            sampling=SamplingParams(temperature=temperature, seed=i, max_tokens=64),
            prompt_token_ids=[i],
            category="math" if i < 6 else "code",
        )
        for i in range(8)
    ]


def check(
    config: RunConfig, method: Sampler, baseline: Sampler | None, every: list[Request]
) -> tuple[Any, list[str]]:
    config.metrics.distribution = 100
    sides = [None if e is None else SimpleNamespace(engine=e) for e in (method, baseline)]
    measurement: Any = SimpleNamespace(method=sides[0], baseline=sides[1], requests=every)
    return sampled.check(config, measurement)


def said(found: Any) -> str:
    lossless: Any = {"verdict": "not_checked", "reason": "sampled", "num_requests_checked": 0}
    return verdict_words(
        {
            **lossless,
            "first_beyond_margin": None,
            "first_divergence": None,
            "num_failed_with_method_only": 0,
            "num_requests_sampled": 8,
            "distribution": found,
        }
    )


def test_equal_engines_are_the_same_and_others_are_not(config: RunConfig) -> None:
    method, baseline = Sampler(0.6), Sampler(0.6)
    found, warnings = check(config, method, baseline, requests())
    assert (found["says"], warnings) == ("same", [])
    assert (found["num_prompts"], found["num_samples"], found["num_tokens"]) == (4, 100, 5)
    assert 0.03 < found["detectable"] < 0.12
    assert not {*method.seeds} & {*baseline.seeds}  # independent, or nothing is tested
    assert len({*method.seeds}) == 400
    found, (warning,) = check(config, Sampler(0.8), baseline, requests())
    assert found["says"] == "different"
    assert "do not have the target's distribution: chi-squared" in warning
    assert "sampled outputs have ANOTHER DISTRIBUTION (4 prompts x 100 samples" in said(found)


def test_samples_that_hardly_vary_tell_nothing(config: RunConfig) -> None:
    """Catches "same" of a test with no degree of freedom: the zoo at the default top_k and
    top_p."""
    found, (warning,) = check(config, Sampler(1.0), Sampler(1.0), requests())
    assert (found["says"], found["degrees_of_freedom"], found["p"]) == ("cannot_tell", 0, 1.0)
    varied = "sampling.temperature=2 sampling.top_p=1 sampling.top_k=0"
    assert "metrics.distribution=100 tells nothing: the first tokens" in warning
    assert varied in warning
    words = said(found)
    assert "cannot tell whether they have the baseline's distribution" in words
    assert varied in words
    older = found | {"says": "same"}
    assert said(older) == words
    assert distribution_says(older) == "cannot_tell"
    assert distribution_says(found | {"says": "same", "detectable": 0.2}) == "same"


def test_prompts_of_all_categories_and_those_that_fail(config: RunConfig) -> None:
    found, warnings = check(config, Sampler(0.6, "code"), Sampler(0.6), requests())
    assert found["num_prompts"] == 3
    (warning,) = warnings
    assert "request r6 is left out" in warning
    every = [request for request in requests() if request.category == "code"]
    found, warnings = check(config, Sampler(0.6, "code"), Sampler(0.6), every)
    assert found is None
    assert "every prompt" in warnings[0]


def test_nothing_to_compare(config: RunConfig) -> None:
    assert check(config, Sampler(0.6), None, requests()) == (None, [])
    found, (warning,) = check(config, Sampler(0.6), Sampler(0.6), requests(0.0))
    assert found is None
    assert "metrics.distribution=100 has no effect: no request samples" in warning


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        (["metrics.distribution=9"], "50 or more samples"),
        (["metrics.distribution=100", "baseline=false"], "leaves no outputs to compare with"),
        (
            [
                *("metrics.distribution=100", "method.verification=synthetic"),
                "method.synthetic_acceptance_length=2",
            ],
            "nothing to compare",
        ),
    ],
)
def test_what_cannot_be_compared_is_refused(typed: list[str], says: str) -> None:
    with pytest.raises(ConfigurationError, match=says):
        plan(typed)


@pytest.mark.slow
def test_sampling_that_tells_and_one_that_does_not(tmp_path: Path) -> None:
    """The default top_k and top_p leave the zoo one token; what the message names does not."""
    typed = ["sampling=stochastic", "metrics.distribution=60", "workload.limit=8", "tracker=none"]
    found = {}
    for name, more in (("default", []), ("varied", MORE_VARIED.split())):
        summary = hydraspec.run([*typed, *more, f"hydra.run.dir={tmp_path}/{name}"], quiet=True)
        found[name] = summary["lossless"]["distribution"]
    assert (found["default"]["says"], found["default"]["detectable"]) == ("cannot_tell", None)
    page = check_page((tmp_path / "default" / "report.html").read_text(encoding="utf-8"))
    assert "cannot be told" in page.text
    assert found["varied"]["says"] == "same"
    assert found["varied"]["detectable"] < 0.2


@pytest.mark.slow
def test_sampled_runs_of_the_zoo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The real engine has the baseline's distribution; drafts at another temperature do not."""
    typed = ["sampling=stochastic", "sampling.temperature=5", "metrics.distribution=200"]
    typed += ["workload.limit=8", "tracker=none", "method.num_speculative_tokens=2"]
    summary = hydraspec.run([*typed, f"hydra.run.dir={tmp_path}/a"], quiet=True)
    found = summary["lossless"]["distribution"]
    assert found["says"] == "same"
    assert found["detectable"] < 0.15
    page = check_page((tmp_path / "a" / "report.html").read_text(encoding="utf-8"))
    assert "Sampled outputs" in page.text

    real = sampled._requests

    def colder(chosen: Sequence[Request], *rest: Any) -> list[Request]:
        made = real(chosen, *rest)
        for request in made if rest[-1] == "method" else ():
            request.sampling.temperature = 3.0
        return made

    monkeypatch.setattr(sampled, "_requests", colder)
    summary = hydraspec.run([*typed, f"hydra.run.dir={tmp_path}/b"], quiet=True)
    assert summary["lossless"]["distribution"]["says"] == "different"
    assert any("do not have the target's distribution" in w for w in summary["warnings"])
