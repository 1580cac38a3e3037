"""Tables of rules for ranges and combinations of keys.

The rules look at values only: files, checkpoints and devices are checked where they are used.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from dataclasses import replace

from hydraspec.config.benches import BENCH, BENCHES, is_rising
from hydraspec.config.choices import choices_of, packaged, shipped_shapes
from hydraspec.config.drafts import (
    K_PER_STEP,
    MAX_SPECULATIVE_TOKENS,
    RECORDED,
    TRACE,
    check_min_survival,
    is_synthetic,
)
from hydraspec.config.engines import KV_CACHE_RULES, NATIVE, OFFERED, VLLM
from hydraspec.config.messages import listing, refusal, show
from hydraspec.config.metrics import METRICS_RULES, without_drafts
from hydraspec.config.rules import Rule, at_least, did_you_mean, enforce
from hydraspec.config.sampling import SAMPLING_RULES, check_sampling_entries, within
from hydraspec.config.schema import (
    AUTO,
    DraftSampling,
    PerStep,
    RunConfig,
    TrackerMode,
    Weights,
)
from hydraspec.config.vllm import STAGES, VLLM_RULES
from hydraspec.config.workloads import WORKLOAD_RULES, check_random_room, without_effect
from hydraspec.pictures import MAX_SOFT_TOKENS
from hydraspec.shipped import SHAPE_PREFIX

MIXED_ROWS = (256, 2048)  # least and most rows of the largest captured step with prompts
# Far past what helps; thousands of threads hang or end the process.
MAX_NUM_THREADS = max(64, 4 * (os.cpu_count() or 1))
MAX_RANKS = 1024  # each is a process; far past what one engine can use
MIN_TIMEOUT_S = 5  # a rank's processor may be taken away for a second or two
MAX_TAG_LENGTH = 64  # in W&B
MAX_PROJECT_LENGTH, NOT_IN_PROJECTS = 128, "/\\#?%:"  # of a project's name in W&B
ALIASES = {"gemma4", AUTO}  # choices that are recorded under another name
LENGTH = "method.synthetic_acceptance_length"


def check(config: RunConfig) -> None:
    """Raise ConfigurationError for the first value or combination that cannot work; add warnings
    about values without effect to `config.warnings`."""
    enforce(RULES, config)
    check_min_survival(config)
    check_sampling_entries(config)
    if config.target.max_model_len is not None:
        check_random_room(config, config.target.max_model_len)
    if config.engine.name == VLLM and config.parallelism.pipeline > 1 and _drafts(config):
        config.warnings.append(STAGES)
    config.warnings.extend(_without_effect(config))


def check_method(config: RunConfig) -> None:
    """Check the rules of method and engine again, once a checkpoint has given method and K."""
    enforce(METHOD_AND_ENGINE, config)


def check_names(config: RunConfig) -> None:
    """Refuse unknown names and empty checkpoints, before defaults that depend on them are set."""
    enforce(NAMES, config)
    known = set(choices_of("method")) - ALIASES - {"none"}
    known -= {name for name in known if not packaged("method", name).get("needs_checkpoint", True)}
    for method, drafter in config.target.drafters.items():
        if method not in known:
            key = f"target.drafters.{method}"
            raise refusal(
                key, drafter, "names no method that takes a checkpoint", allowed=listing(known)
            )


def _named(group: str, *more: str) -> Rule:
    def known() -> set[str]:
        return set(choices_of(group)) - ALIASES

    return Rule(
        f"{group}.name",
        lambda name, c: name in known() or name in more,
        lambda name, c: listing(known()),
        "is unknown",
        lambda name, c: did_you_mean(group, name, known(), f"choose with {group}=<choice>"),
        names=True,
    )


def _not_empty(key: str) -> Rule:
    allowed, remedy = "a folder, a hub id or zoo:<name>", "write one of these, or leave the key out"
    return Rule(key, lambda checkpoint, c: checkpoint != "", allowed, "is empty", remedy)


def _shape(group: str) -> Iterator[Rule]:
    """Rules of a checkpoint "shape:<name>": a shape that ships with the package, random weights."""
    key = f"{group}.checkpoint"

    def is_shape(c: RunConfig) -> bool:
        return (getattr(c, group).checkpoint or "").startswith(SHAPE_PREFIX)

    def known() -> list[str]:
        return [SHAPE_PREFIX + name for name in shipped_shapes()]

    yield Rule(
        key,
        lambda shape, c: shape in known(),
        lambda shape, c: listing(known()),
        "is no shape that ships with the package",
        lambda shape, c: did_you_mean(key, shape, known()),
        when=is_shape,
    )
    yield Rule(
        key,
        lambda shape, c: getattr(c, group).weights is Weights.random,
        f"a folder or a hub id, or a shape with {group}.weights=random",
        f"has no weights, and {group}.weights is {{c.{group}.weights.value}}",
        f"add {group}.weights=random",
        when=is_shape,
    )


def _axis(axis: str) -> Iterator[Rule]:
    """Rules of the number of ranks along an axis of the parallelism group."""
    key = f"parallelism.{axis}"
    yield at_least(key, 1)
    yield Rule(
        key,
        lambda size, c: size == 1,
        "1",
        "is not available with engine=transformers, which uses one device",
        "choose parallelism=single, or engine=native or engine=vllm",
        when=lambda c: c.engine.name == "transformers",
    )
    yield Rule(
        key,
        lambda size, c: size == 1 or c.parallelism.num_ranks <= MAX_RANKS,
        lambda size, c: (
            f"{MAX_RANKS} or less for parallelism.tensor x parallelism.pipeline x parallelism.data"
        ),
        lambda size, c: f"makes {c.parallelism.num_ranks} ranks, a process each",
        "choose as many ranks as there are devices",
        when=_is_native,
    )


def _drafts(c: RunConfig) -> bool:
    """Returns whether the method drafts with a known K; with method=auto a checkpoint may say K."""
    return c.method.name != "none" and (c.method.name, c.method.num_speculative_tokens) != (AUTO, 0)


def _is_native(c: RunConfig) -> bool:
    return c.engine.name == NATIVE


def _rows(c: RunConfig) -> int:
    """Rows of one request in a step that verifies drafts: K+1."""
    return c.method.most_drafts + 1


NAMES = (
    *(_named("method", AUTO), _named("engine"), _named("cudagraph")),
    Rule(
        "bench.name",
        lambda name, c: name in BENCHES,
        listing(BENCHES),
        "is unknown",
        names=True,
    ),
    *(_not_empty("target.checkpoint"), _not_empty("method.checkpoint")),
)

METHOD_AND_ENGINE = (
    Rule(
        "method.num_speculative_tokens",
        lambda k, c: k is PerStep.auto or 1 <= k <= MAX_SPECULATIVE_TOKENS,
        f"1 to {MAX_SPECULATIVE_TOKENS}, or auto (chosen for each step)",
        remedy=lambda k, c: (
            "most drafters pay off at 2 to 6"
            if k > 0
            else "to decode without drafts choose method=none"
        ),
        when=_drafts,
    ),
    *K_PER_STEP,
    Rule(
        LENGTH,
        lambda length, c: (
            length is not None or c.method.synthetic_trace is not None or not is_synthetic(c)
        ),
        lambda length, c: f"1 to {_rows(c)} (K+1)",
        "leaves verification=synthetic without its target",
        f"add {LENGTH}=<number> or {TRACE}=<folder of a run>, or choose "
        "method.verification=standard",
        when=_drafts,
    ),
    *(replace(rule, when=_drafts) for rule in RECORDED),
    Rule(
        LENGTH,
        lambda length, c: length is None or is_synthetic(c),
        "null",
        "has no meaning with verification={c.method.verification.value}",
        "add method.verification=synthetic, or leave the key out",
        when=_drafts,
    ),
    Rule(
        LENGTH,
        lambda length, c: length is None or 1 <= length <= _rows(c),
        lambda length, c: f"1 to {_rows(c)} (num_speculative_tokens + 1: the bonus token counts)",
        when=_drafts,
    ),
    at_least("engine.max_num_seqs", 1),
    Rule(
        "engine.num_threads",
        lambda number, c: number is None or 1 <= number <= MAX_NUM_THREADS,
        f"1 to {MAX_NUM_THREADS}, or null to have it chosen",
    ),
    *OFFERED,
    *KV_CACHE_RULES,
    Rule(
        "engine.max_num_batched_tokens",
        lambda most, c: most >= c.engine.max_num_seqs * _rows(c),
        lambda most, c: f"{c.engine.max_num_seqs * _rows(c)} or more",
        lambda most, c: (
            f"cannot hold a step of engine.max_num_seqs={c.engine.max_num_seqs}, {_rows(c)} rows "
            "each"
        ),
        "raise it, or lower engine.max_num_seqs",
        when=_is_native,
    ),
    Rule(
        "engine.max_mixing_cost",
        lambda share, c: share is None or 0.05 <= share <= 1,
        "a share from 0.05 to 1, or null for no bound",
        "is out of range",
        "a larger one evens out the times between tokens",
    ),
)

RULES = (
    within("seed", "seed"),
    at_least("target.max_model_len", 2, "2 or more, or null"),
    Rule(
        "target.max_soft_tokens",
        lambda most, c: most is None or most in MAX_SOFT_TOKENS,
        f"one of {', '.join(map(str, MAX_SOFT_TOKENS))}, or null",
        "is no number of tokens that a picture may have",
        "leave the key out to have what the checkpoint says",
    ),
    *_shape("target"),
    *_shape("method"),
    *METHOD_AND_ENGINE,
    *(*_axis("tensor"), *_axis("pipeline"), *_axis("data")),
    Rule(  # whether the layers fit the target is checked when the target is read
        "parallelism.pipeline_layers",
        lambda layers, c: (
            layers is None or (len(layers) == c.parallelism.pipeline and min(layers) > 0)
        ),
        "null, or a number of layers for each stage (parallelism.pipeline), 1 or more",
        "is no split over {c.parallelism.pipeline} stages",
        "leave the key out for a balanced split",
    ),
    Rule(
        "parallelism.pipeline_layers",
        lambda layers, c: layers is None or c.engine.name in (NATIVE, VLLM),
        "null with engine={c.engine.name}",
        "is for engine=native and engine=vllm",
        "leave the key out",
    ),
    Rule(
        "parallelism.timeout_s",
        lambda seconds, c: MIN_TIMEOUT_S <= seconds < math.inf,
        f"{MIN_TIMEOUT_S} or more, in seconds",
        remedy="leave the key out, or raise it where a step takes longer",
    ),
    Rule(
        "cudagraph.capture_sizes",
        lambda sizes, c: sizes is None or is_rising(sizes),
        "rising whole numbers from 1 on, e.g. [1, 2, 4, 8], or null",
        "is no list of sizes",
        "sort them and leave out what occurs twice",
    ),
    Rule(
        "cudagraph.max_mixed_rows",
        lambda rows, c: MIXED_ROWS[0] <= rows <= MIXED_ROWS[1],
        f"{MIXED_ROWS[0]} to {MIXED_ROWS[1]}",
        remedy="leave the key out: larger steps run eagerly",
    ),
    Rule(
        "cudagraph.max_mixed_rows",
        lambda rows, c: rows == MIXED_ROWS[1],
        f"{MIXED_ROWS[1]}",
        "has no meaning with engine={c.engine.name}",
        "leave the key out, or choose engine=native",
        when=lambda c: not _is_native(c),
    ),
    Rule(
        "cudagraph.capture_sizes",
        lambda sizes, c: sizes is None or sizes[-1] <= c.engine.max_num_seqs,
        "1 to {c.engine.max_num_seqs} (engine.max_num_seqs)",
        "holds batches larger than any",
        lambda sizes, c: f"leave out what is larger, or raise engine.max_num_seqs to {sizes[-1]}",
    ),
    *SAMPLING_RULES,
    *WORKLOAD_RULES,
    Rule(  # Weights & Biases refuses such names, which would cost the run its record
        "tracker.project",
        lambda name, c: (
            name.strip()
            and len(name) <= MAX_PROJECT_LENGTH
            and all(char not in NOT_IN_PROJECTS and char.isprintable() for char in name)
        ),
        f"1 to {MAX_PROJECT_LENGTH} characters, none of {' '.join(NOT_IN_PROJECTS)}",
        "names no project",
        "choose another name, or tracker=none",
    ),
    Rule(
        "tracker.name",
        lambda name, c: name.strip() and name.isprintable() and len(name) <= MAX_PROJECT_LENGTH,
        f"1 to {MAX_PROJECT_LENGTH} printable characters",
        "names no run",
        names=True,
    ),
    Rule(
        "tracker.name",
        lambda name, c: c.tracker.mode is not TrackerMode.disabled or name in ("none", "wandb"),
        "the name of the choice: none, wandb",
        "names a run, and nothing is recorded (tracker=none, or tracker.mode=disabled)",
        "choose tracker=wandb with tracker.mode=offline, or leave the name out",
        names=True,
    ),
    Rule(
        "tracker.tags",
        lambda tags, c: all(len(tag.strip()) > 0 and len(tag) <= MAX_TAG_LENGTH for tag in tags),
        f"tags of 1 to {MAX_TAG_LENGTH} characters",
        "holds a tag that W&B refuses",
    ),
    *VLLM_RULES,
    *METRICS_RULES,
    *BENCH,
)


def _without_effect(config: RunConfig) -> list[str]:
    """Warnings about values that are legal and change nothing."""
    notes = []
    sampling, method = config.sampling, config.method
    if sampling.temperature == 0:
        for key, off in (("top_k", 0), ("top_p", 1.0), ("min_p", 0.0)):
            if getattr(sampling, key) != off:
                notes.append(
                    f"sampling.{key}={getattr(sampling, key)} has no effect at temperature 0"
                )
        if method.draft_sampling is DraftSampling.probabilistic:
            notes.append("method.draft_sampling=probabilistic drafts greedily at temperature 0")
    if config.cudagraph.name == "none" and config.cudagraph.capture_sizes is not None:
        notes.append("cudagraph.capture_sizes has no effect with cudagraph=none")
    return notes + _without_weights(config) + without_drafts(config) + without_effect(config)


def _without_weights(config: RunConfig) -> list[str]:
    """Warnings of keys for a draft head where the method has none."""
    method = config.method
    if method.needs_checkpoint or method.name == "none":
        return []
    found = {"weights": method.weights.value, "draft_sampling": method.draft_sampling.value}
    usual = {"weights": "checkpoint", "draft_sampling": "greedy", "checkpoint": None}
    return [
        f"method.{key}={show(value)} has no effect with method={method.name}, which has no weights"
        for key, value in {**found, "checkpoint": method.checkpoint}.items()
        if value != usual[key]
    ]
