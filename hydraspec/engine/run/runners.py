"""Which runner an engine has: by device, and by pipeline stage."""

from __future__ import annotations

from hydraspec.engine.cache.kv_cache import KVCache
from hydraspec.engine.cache.sizing import Models
from hydraspec.engine.run.device_runner import DeviceRunner
from hydraspec.engine.run.stage_io import StageIO
from hydraspec.engine.run.stage_runner import EarlierStageRunner, LastStageRunner
from hydraspec.engine.run.state import new_request_state
from hydraspec.engine.run.step_graphs import RunnerLimits
from hydraspec.engine.schedule.draft_lengths import offered_lengths
from hydraspec.graphs import GraphBackend, GraphModes, default_capture_sizes
from hydraspec.parallel.control import ALONE, Control
from hydraspec.sampling.verifier import build_verifier


def build_runner(
    models: Models,
    kv: KVCache,
    modes: GraphModes,
    backend: GraphBackend | None,
    control: Control = ALONE,
    *,
    activation_bytes: int = 0,
) -> DeviceRunner:
    """The runner of these models' steps. activation_bytes: as in RunnerLimits."""
    config, target, speculator = models.config, models.target, models.speculator
    num_drafts = speculator.num_speculative_tokens
    state = new_request_state(
        num_slots=config.engine.max_num_seqs,
        max_model_len=models.max_model_len,
        num_speculative_tokens=num_drafts,
        draft_vocab_size=speculator.draft_vocab_size,
        device=target.device,
        draft_vocab_map=speculator.draft_vocab_map,
    )
    verifier = build_verifier(
        config.method.verification.value,
        synthetic_acceptance_length=config.method.synthetic_acceptance_length,
        vocabulary=target.vocabulary,
    )
    most = config.engine.max_num_seqs
    limits = RunnerLimits(
        max_num_seqs=most,
        max_num_batched_tokens=config.engine.max_num_batched_tokens,
        num_speculative_tokens=num_drafts,
        max_seq_len=models.cache_size().max_tokens,
        capture_sizes=tuple(config.cudagraph.capture_sizes or default_capture_sizes(most)),
        launch_bound_rows=launch_bound_rows(target.hidden_size),
        draft_lengths=offered_lengths(config.method),
        activation_bytes=activation_bytes,
        vocab_size=target.vocab_size,
    )
    kind = DeviceRunner
    if models.link is not None:
        kind = LastStageRunner if target.stage.is_last else EarlierStageRunner
    runner = kind(
        *(target, speculator, verifier, kv, state),
        limits=limits,
        modes=modes,
        backend=backend,
        control=control,
    )
    if models.link is not None:
        runner.io = StageIO.of(models)
    return runner


def launch_bound_rows(hidden_size: int) -> int:
    """Rows up to which the host takes longer to launch a layer's kernels than the device to run
    them: 0.28 ms (measured, E4B on one H200), against two operations for each of the layer's
    weights, about 14 * hidden_size ** 2 (11 to 17 in Gemma 4, Qwen3 and Llama), at 6e14 a second.
    """
    return int(0.28e-3 * 6e14 / (2 * 14 * hidden_size**2))
