"""Drafts from the host, or copied from the text, on a device: graphs of every length, no wait for
an upload, and the drafts of the CPU.

Alone: `pytest -m gpu tests/engine/test_host_drafts_on_gpu.py -s`.
"""

from __future__ import annotations

import pytest
from graph_runs import GRAPH_MODES, graph_config, make_graph_engine, run_requests, zoo_requests
from graph_runs import no_waiting as without_waiting

from hydraspec.config.schema import Device, Dtype, RunConfig

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]


def config_of(method: str, mode: str, device: Device, *, ahead: bool) -> RunConfig:
    config = graph_config(
        method, mode, pair=("tiny_qwen3", None), device=device, dtype=Dtype.float32
    )
    config.engine.async_scheduling = ahead
    return config


@pytest.mark.parametrize("ahead", [True, False], ids=["ahead", "waiting"])
@pytest.mark.parametrize("mode", ["none", *GRAPH_MODES])
@pytest.mark.parametrize("method", ["suffix", "ngram"])
def test_the_device_decodes_as_the_cpu(method: str, mode: str, ahead: bool) -> None:
    cpu = make_graph_engine(config_of(method, "none", Device.cpu, ahead=ahead), None)
    wanted = run_requests(cpu, zoo_requests(8))
    engine = make_graph_engine(config_of(method, mode, Device.cuda, ahead=ahead), None)
    run_requests(engine, zoo_requests(8))
    with without_waiting():
        found = run_requests(engine, zoo_requests(8))
    assert found.tokens == wanted.tokens
    assert found.drafts == wanted.drafts
    assert found.num_accepted == wanted.num_accepted > 0
