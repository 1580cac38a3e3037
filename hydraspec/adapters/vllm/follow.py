"""A host that lends its devices to a vLLM engine on another one: engine.vllm.node_rank above 0.

vLLM's own `serve --headless` does the same. Checked against vLLM 0.26; a test on several hosts is
missing.
"""

from __future__ import annotations

import logging
from typing import Any

from hydraspec.adapters.vllm.loading import Environment, prepare
from hydraspec.config.schema import RunConfig

log = logging.getLogger(__name__)


def follow(config: RunConfig) -> dict[str, Any]:
    """Runs this host's ranks until the engine on the host with node_rank=0, or one of them, ends.

    Returns:
        A summary without results.

    Raises:
        ConfigurationError, CheckpointError: as for an engine.
    """
    environment = Environment(one_process=True)
    try:
        _, arguments = prepare(config, environment)
        from vllm import AsyncEngineArgs
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        options = config.engine.vllm
        log.info(
            "host %d of %d: ranks of the vLLM engine at %s:%d run here until it ends",
            *(options.node_rank, options.nnodes, options.master_addr, options.master_port),
        )
        found = AsyncEngineArgs(**arguments).create_engine_config(headless=True)
        executor = MultiprocExecutor(found, monitor_workers=False)
        try:
            executor.start_worker_monitor(inline=True)
        finally:
            executor.shutdown()
    finally:
        environment.restore()
    return {"status": "ok", "follows": f"{options.master_addr}:{options.master_port}"}
