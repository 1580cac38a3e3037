"""Records made after the measured rounds: drafts from every place of the outputs, for metrics.trace
and metrics.all_positions, and the texts of their tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch

from hydraspec.config.schema import RunConfig, Verification
from hydraspec.lab.rounds import Measurement
from hydraspec.metrics.draft_figures import teacher_forced
from hydraspec.models.checkpoint.reader import resolve_folder
from hydraspec.models.tokenizer import load_tokenizer
from hydraspec.speculators.registry import SPECULATORS
from hydraspec.types import CheckpointError, PositionScores

log = logging.getLogger(__name__)


def record(
    config: RunConfig,
    measurement: Measurement,
    add: Callable[[PositionScores], None],
    decode: Callable[[Sequence[int]], str] | None,
) -> list[str]:
    """Pass the scores of each finished request to `add`, and count them, if the run records them;
    `decode` returns the text of token ids. Returns warnings. A trace without ranks is no warning,
    as some engines cannot give ranks.

    If the device lacks memory for the pass, or another package's drafter cannot take part in it,
    the run only lacks these records.
    """
    wanted = [name for name in ("trace", "all_positions") if getattr(config.metrics, name)]
    method = measurement.method
    if not wanted or method.engine.info.num_speculative_tokens == 0:
        return []
    missing, is_warning = "", config.metrics.all_positions
    if config.method.verification is Verification.synthetic:
        missing = "with method.verification=synthetic outputs are not the target's"
    else:
        try:
            found = method.engine.position_scores(measurement.requests, method.completions)
            if found is None:
                missing = "only our own draft heads on one device give them"
            else:
                method.teacher_forced = teacher_forced(_each_added(found, add), decode)
        except torch.OutOfMemoryError:
            missing, is_warning = "the device's memory is full: lower its KV cache", True
        except Exception as error:
            if config.method.name in SPECULATORS:
                raise
            missing = f"its drafter cannot be fed whole texts: {type(error).__name__}: {error}"
            is_warning = True
    if not missing:
        return []
    warning = f"metrics.{wanted[-1]}=true: drafts have no ranks or probabilities: {missing}"
    log.log(logging.WARNING if is_warning else logging.INFO, warning)
    return [warning] if is_warning else []


def _each_added(
    found: Iterable[PositionScores], add: Callable[[PositionScores], None]
) -> Iterator[PositionScores]:
    for scores in found:
        add(scores)
        yield scores


def decoder(config: RunConfig) -> Callable[[Sequence[int]], str] | None:
    """Function from token ids to text without special tokens; None if the target has no tokenizer,
    or if the run records no drafts and so shows no tokens. Engines give texts of whole outputs
    only, so the target's tokenizer is read once more.
    """
    if not (config.metrics.trace or config.metrics.all_positions):
        return None
    try:
        tokenizer = load_tokenizer(resolve_folder(config.target.checkpoint))
    except CheckpointError:
        return None
    if tokenizer is None:
        return None
    known = tokenizer

    def decode(token_ids: Sequence[int]) -> str:
        try:
            return known.decode(token_ids)
        except (CheckpointError, ValueError, OverflowError, TypeError):  # an id it does not know
            return ""

    return decode
