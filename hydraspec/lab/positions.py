"""After the measured rounds: drafts from every place of the outputs, for metrics.trace and
metrics.all_positions, and the texts of their tokens.
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
    """Hand `add` the scores of each finished request, and count them, where the run records them;
    `decode` gives tokens their text. Returns warnings; that a trace has no ranks is none, as some
    engines cannot give them.

    A device without memory for the pass, or another package's drafter that cannot take part in it,
    costs the run nothing but these records.
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
    """Text of token ids, without special tokens; None where the target has no tokenizer, or the run
    records no drafts and so shows none of its tokens. Engines give texts of whole outputs only, so
    the target's tokenizer is read once more.
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
        except (CheckpointError, ValueError, OverflowError, TypeError):  # no token of its files
            return ""

    return decode
