"""A loaded drafter with its target, and the target's answers to a workload, on which it is
examined.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hydraspec import factory
from hydraspec.config.schema import RunConfig
from hydraspec.models.base import TargetModel
from hydraspec.models.checkpoint.reader import read_json, resolve_folder
from hydraspec.models.draft_spec import DraftSpec
from hydraspec.models.tokenizer import Tokenizer
from hydraspec.speculators import registry
from hydraspec.speculators.teacher_forcing.texts import (
    Text,
    Texts,
    continued,
    finished_texts,
    read_texts,
)
from hydraspec.speculators.teacher_forcing.trial import Trial
from hydraspec.types import Completion, Request, SamplingParams

MAX_PROMPTS = 32  # if workload.limit is not set
MAX_OUTPUT = 64  # tokens of each answer, at most
MAX_ROWS = 8192  # tokens of all prompts and answers together, at most
MAX_STATE_BYTES = 4 << 30  # memory for the kept states of the target's layers
SHARE_OF_FREE_MEMORY = 0.5  # of a GPU, for the engine's KV cache if its size is not configured


Raw = dict[str, Any]  # the content of a config.json or params.json


def _config_file(folder: Path) -> Path:
    """The configuration file of a checkpoint folder: config.json, or Mistral's params.json."""
    return next(p for p in (folder / "config.json", folder / "params.json") if p.is_file())


@dataclass(slots=True, frozen=True, kw_only=True)
class Answers:
    """The target's answers to some requests.

    Attributes:
        texts: the answers of two tokens or more; None where there are none.
        left_out: indices of requests of which `texts` says nothing: those beyond MAX_ROWS, those
            without room for K further tokens, and those that ended in an error.
    """

    texts: Texts | None
    left_out: frozenset[int]


@dataclass(slots=True, kw_only=True)
class Patient:
    """The drafter under examination, loaded in an engine with its target."""

    engine: Any  # a NativeEngine
    config: RunConfig
    target: TargetModel
    tokenizer: Tokenizer | None  # the target's
    speculator: Any  # a DraftModelSpeculator, or a speculator of another package

    @property
    def spec(self) -> DraftSpec:
        """The drafter's conventions as the engine reads them."""
        spec: DraftSpec | None = self.speculator.spec
        assert spec is not None, "it is loaded"
        return spec

    @property
    def k(self) -> int:
        """Number of drafts per step, K."""
        return self.config.method.most_drafts

    def greedy(self, requests: Sequence[Request]) -> list[Request]:
        """The same requests for greedy answers of at most MAX_OUTPUT tokens, all at once."""
        return [replace(r, sampling=_greedy(r.sampling), arrival_s=None) for r in requests]

    def trial(self) -> Trial:
        """The drafter with the conventions that the engine uses."""
        return Trial.of(self.speculator.head)

    def raw_config(self) -> Raw:
        """The content of the drafter's configuration file."""
        return read_json(_config_file(self._folder()))

    def rebuilt(self, edit: Callable[[Raw], None]) -> Any:
        """A new head from the same weights and an edited configuration. The checkpoint's folder is
        not changed.

        edit: changes the content of the configuration in place.

        Raises:
            UserError: the weights do not fit the edited configuration.
        """
        folder = self._folder()
        config = _config_file(folder)
        raw = read_json(config)
        edit(raw)
        with tempfile.TemporaryDirectory() as place:
            for file in folder.iterdir():
                if file != config:
                    (Path(place) / file.name).symlink_to(file.resolve())
            (Path(place) / config.name).write_text(json.dumps(raw), encoding="utf-8")
            method = replace(self.config.method, checkpoint=place)
            speculator: Any = registry.build_speculator(replace(self.config, method=method))
            speculator.load(self.target)
        _unpack(speculator.head)
        return speculator.head

    def _folder(self) -> Path:
        return resolve_folder(self.config.method.checkpoint or str(self.config.target.checkpoint))

    def texts(self, requests: Sequence[Request]) -> Texts | None:
        """The texts of `answers`."""
        return self.answers(requests).texts

    def answers(self, requests: Sequence[Request]) -> Answers:
        """The target's greedy answers to tokenised requests, with its states at every row."""
        baseline = self.engine.baseline()
        run, greedy = partial(baseline.run, concurrency=None), self.greedy(requests)
        ended = {event.index: event for event in run(greedy) if isinstance(event, Completion)}
        kept: list[Text] = []
        left_out = {i for i, done in ended.items() if done.finish_reason == "error"}
        num_rows = 0
        for text in continued(finished_texts(greedy, ended), self.k, run):
            num_rows += len(text.token_ids)
            if text.num_more == self.k and (num_rows <= MAX_ROWS or not kept):
                kept.append(text)
            else:
                left_out.add(text.index)
        if not kept:
            return Answers(texts=None, left_out=frozenset(left_out))
        num_rows = sum(len(text.token_ids) for text in kept)
        keep = _kept_layers(self.target, num_rows, self.spec.aux_layer_ids)
        encode = baseline.parts.runner.images.rows
        texts = read_texts(self.target, kept, k=self.k, keep=keep, encode=encode)
        return Answers(texts=texts, left_out=frozenset(left_out))


def _kept_layers(target: TargetModel, num_rows: int, wanted: Sequence[int]) -> list[int]:
    """Layers whose output states are kept for variants: all, or only those within two of `wanted`
    and the last one if all would exceed MAX_STATE_BYTES.
    """
    everything = list(range(target.num_layers + 1))
    a_state = num_rows * target.hidden_size * target.dtype.itemsize
    if len(everything) * a_state <= MAX_STATE_BYTES:
        return everything
    near = {i + d for i in wanted for d in (-2, -1, 0, 1, 2)} | {target.num_layers}
    return [i for i in everything if i in near]


def _greedy(sampling: SamplingParams) -> SamplingParams:
    return SamplingParams(
        max_tokens=min(sampling.max_tokens, MAX_OUTPUT),
        stop_token_ids=sampling.stop_token_ids,
        ignore_eos=sampling.ignore_eos,
    )


@contextmanager
def loaded(config: RunConfig) -> Iterator[Patient]:
    """The drafter and target of a configuration, loaded on one device without CUDA graphs; the
    engine is closed afterwards.
    """
    engine_config = config.engine
    cache = engine_config.kv_cache
    is_silent = cache.memory_gib is None and cache.memory_fraction is None
    if is_silent and factory.device_type(config) != "cpu":
        # The rest holds the states and KV of the texts.
        cache = replace(cache, memory_fraction=SHARE_OF_FREE_MEMORY)
        engine_config = replace(engine_config, kv_cache=cache)
    config = replace(config, cudagraph=replace(config.cudagraph, name="none"), engine=engine_config)
    engine: Any = factory.build_engine(config)
    factory.log_notes(engine)
    try:
        parts = engine.parts
        _unpack(getattr(parts.runner.speculator, "head", None))
        yield Patient(
            engine=engine,
            config=config,
            target=parts.target,
            tokenizer=parts.tokenizer,
            speculator=parts.runner.speculator,
        )
    finally:
        engine.close()


def _unpack(head: Any) -> None:
    """Turn the quantised matrices of a head into float ones, in place, since variants and training
    need such. Their rows are no longer rounded, which changes acceptance by far less than a fault.
    """
    if getattr(head, "quantization", None) is not None:
        head.unpack()


def few(requests: Sequence[Request], count: int) -> list[Request]:
    """At most `count` requests, the same number from each category, evenly spread over it."""
    if len(requests) <= count:
        return list(requests)
    categories = dict.fromkeys(r.category for r in requests)
    share = -(-count // len(categories))
    found = []
    for category in categories:
        those = [r for r in requests if r.category == category]
        take = min(share, len(those))
        found += [those[i * len(those) // take] for i in range(take)]
    return sorted(found, key=lambda r: r.index)[:count] if len(found) > count else found
