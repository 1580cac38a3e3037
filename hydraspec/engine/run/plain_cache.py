"""The parts of an engine over a cache that rounds nothing, beside one whose cache is in FP8."""

from __future__ import annotations

from dataclasses import replace

from hydraspec.config.schema import KVDtype, MethodConfig
from hydraspec.engine.run.loading import Loaded, assemble
from hydraspec.models.decoder import Decoder
from hydraspec.speculators.none import NoSpeculator

MOST_AT_ONCE = 4  # requests


def load_plain(loaded: Loaded) -> Loaded | None:
    """The same target without a drafter, over a small cache of its own that rounds nothing, without
    graphs; None where the cache is in the target's type, or ranks share the work.

    Raises ConfigurationError: no memory is left for the cache.
    """
    engine, target = loaded.config.engine, loaded.target
    alone = target.vocabulary.group.size == target.stage.count == 1
    if not isinstance(target, Decoder) or not target.kv_scales or not alone:
        return None
    config = replace(
        loaded.config,
        method=MethodConfig(name="none", num_speculative_tokens=0),
        cudagraph=replace(loaded.config.cudagraph, name="none"),
        engine=replace(
            engine,
            kv_cache=replace(engine.kv_cache, dtype=KVDtype.auto),
            max_num_seqs=min(engine.max_num_seqs, MOST_AT_ONCE),
            prefix_caching=False,
        ),
    )
    target = target.over_plain_cache()
    return assemble(config, target, loaded.tokenizer, NoSpeculator(config), None)
