"""Keys that a method declares itself, under method.options: checked and recorded like any other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from installed import install, on_path
from omegaconf import OmegaConf

from hydraspec import plugins
from hydraspec.cli.compose import plan
from hydraspec.config import to_dict, to_run_config
from hydraspec.config.schema import RunConfig
from hydraspec.errors import ConfigurationError

SOURCE = """
from dataclasses import dataclass, field
from enum import Enum
from hydraspec.config.options import between

class Order(Enum):
    newest = "newest"
    oldest = "oldest"

@dataclass(kw_only=True)
class Options:
    length: int = field(metadata=between(1, 4))
    share: float = field(metadata=between(0, 1))
    order: Order
    stop: int | None = field(default=None, metadata=between(0, 9))

    def __post_init__(self) -> None:
        if self.length == 3:
            raise ValueError("three is unlucky")
"""
YAML = """name: markov
num_speculative_tokens: 2
needs_checkpoint: false
options:
  length: 2  # of the pattern
  share: 0.5
  order: newest
"""
KEYS = "allowed: keys of method.options are length, order, share"


@pytest.fixture
def place(tmp_path: Path) -> Iterator[str]:
    points = {plugins.OPTIONS: {"markov": "acme_options:Options"}}
    install(tmp_path, "acme-markov", modules={"acme_options.py": SOURCE}, points=points)
    (tmp_path / "method").mkdir()
    (tmp_path / "method" / "markov.yaml").write_text(YAML)
    with on_path(tmp_path):
        yield f"hydra.searchpath=['file://{tmp_path}']"


def composed(*overrides: str) -> RunConfig:
    config = plan(overrides).jobs[0].config
    return config


def test_options_have_the_types_that_the_method_declares(place: str) -> None:
    options = composed(place, "method=markov", "method.options.share=1").method.options
    assert (options.length, options.share, options.order.value) == (2, 1.0, "newest")
    assert options.stop is None


def test_options_are_swept_and_recorded(place: str) -> None:
    swept = plan([place, "method=markov", "method.options.length=1,2"], multirun=True)
    assert [to_dict(job.config)["method"]["options"]["length"] for job in swept.jobs] == [1, 2]
    for config in (job.config for job in swept.jobs):
        assert to_run_config(OmegaConf.create(OmegaConf.to_yaml(to_dict(config)))) == config
    assert "options" not in to_dict(composed())["method"]


@pytest.mark.parametrize(
    ("typed", "parts"),
    [
        ("method.options.length=5", ["method.options.length=5 is out of range", "allowed: 1 to 4"]),
        ("method.options.length=x", ["method.options.length=x is text", "a whole number"]),
        ("method.options.order=both", ["method.options.order=both is no choice", "newest, oldest"]),
        ("method.options.length=3", ["cannot be used: three is unlucky", "keys of method.options"]),
        ("method.options.lenght=1", ["method.options.lenght=1", KEYS, "did you mean"]),
        ("+method.options.lenght=1", ["=1 is no key", KEYS, "did you mean method.options.length"]),
        ("+method.options.stop=10", ["method.options.stop=10 is out of range", "0 to 9"]),
        ("~method.options.length", ["method.options.length has no value", "a whole number"]),
        ("method.options=3", ["method.options=3 is not a group", "length, order, share"]),
    ],
)
def test_an_option_is_refused_with_key_value_range_and_remedy(
    place: str, typed: str, parts: list[str]
) -> None:
    with pytest.raises(ConfigurationError) as refused:
        composed(place, "method=markov", typed)
    message = str(refused.value)
    assert [part for part in parts if part not in message] == []
    assert len(message.splitlines()) == 3


def test_a_method_without_options_takes_none(place: str) -> None:
    with pytest.raises(
        ConfigurationError, match=r"method\.options\.length=1 is no key of method=g"
    ):
        composed(place, "method.options.length=1")
    with pytest.raises(
        ConfigurationError, match=r"length=1 is no key\n.*method.options has no key"
    ):
        composed(place, "+method.options.length=1")


def test_options_that_are_no_dataclass_name_their_package(tmp_path: Path) -> None:
    points = {plugins.OPTIONS: {"markov": "acme_odd:Options"}}
    install(tmp_path, "acme-odd", modules={"acme_odd.py": "Options = dict"}, points=points)
    (tmp_path / "method").mkdir()
    (tmp_path / "method" / "markov.yaml").write_text(YAML)
    with on_path(tmp_path), pytest.raises(ConfigurationError, match=r"acme-odd 1\.0: .*dataclass"):
        composed(f"hydra.searchpath=['file://{tmp_path}']", "method=markov")


@pytest.mark.parametrize(
    ("typed", "message"),
    [
        ("method.options.max_tree_depth=1", r"max_tree_depth=1 is out of range\n.*2 to 64"),
        ("method.options.max_cached_requests=-1", r"max_cached_requests=-1 is out of range"),
        ("method.options.max_cache_mib=0", r"max_cache_mib=0 is out of range"),
        ("method.options.max_spec_factor=0", r"max_spec_factor=0\.0 is out of range\n.*0\.1 to 32"),
        ("method.options.min_token_prob=1.5", r"min_token_prob=1\.5 is out of range\n.*0 to 1"),
        ("method.options.prompt_lookup_min=2", r"prompt_lookup_min"),
        ("method.num_speculative_tokens=auto", r"its own number of drafts in each step\n.*1 to 32"),
        ("method.num_speculative_tokens=33", r"num_speculative_tokens=33 is out of range"),
        ("engine=vllm", r"method=suffix is not available with engine=vllm"),
        ("engine=transformers", r"method=suffix is not available with engine=transformers"),
    ],
)
def test_what_suffix_decoding_does_not_take_is_one_message(typed: str, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        composed("method=suffix", typed)
