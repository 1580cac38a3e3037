"""vLLM's public interface as engine=vllm uses it, over a target that is arithmetic.

Requests hand out tokens, statistics count drafts over all of a step's requests: as in vLLM, which
request was accepted how much is told by neither alone.
"""

from __future__ import annotations

import asyncio
import enum
import importlib
import sys
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from fake_engine import target_token

VOCAB_SIZE = 64
SCRIPT = (3, 0, 2, 1)  # accepted drafts by step of each request, cycled


class RequestOutputKind(enum.Enum):
    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


class SamplingParams(SimpleNamespace):
    def __init__(self, **fields: Any) -> None:
        if fields["min_p"] > 0.5:
            raise ValueError("min_p is not yet supported with speculative decoding.")
        super().__init__(**fields)


class EngineArgs(SimpleNamespace):
    """Remembers what it is given."""


class FakeRequest:
    """A request on its way through the fake."""

    num_cached = 0

    def __init__(self, name: str, prompt: Sequence[int], params: Any) -> None:
        self.name, self.prompt, self.params = name, list(prompt), params
        self.output: list[int] = []
        self.scheduled_ts = 0.0
        self.turn = 0

    def advance(self, width: int, max_model_len: int) -> tuple[list[int], int, int]:
        """Tokens of one step, drafts offered, drafts accepted."""
        room = max_model_len - len(self.prompt) - len(self.output)
        self.scheduled_ts = self.scheduled_ts or time.monotonic()
        width = min(width, max(0, room - 1)) if self.output else 0
        accepted = min(width, SCRIPT[self.turn % len(SCRIPT)])
        self.turn += bool(self.output)
        new: list[int] = []
        for _ in range(accepted + 1):
            new.append(target_token([*self.prompt, *self.output, *new]))
            if self._ends(new, max_model_len):
                break
        self.output += new
        return new, width, accepted

    def _ends(self, new: list[int], max_model_len: int) -> bool:
        count = len(self.output) + len(new)
        if new[-1] in self.params.stop_token_ids:
            self.reason: str | None = "stop"
            return True
        full = count >= self.params.max_tokens or len(self.prompt) + count >= max_model_len
        self.reason = "length" if full else None
        return full

    def as_output(self, new: list[int]) -> Any:
        final_only = self.params.output_kind is RequestOutputKind.FINAL_ONLY
        completion = SimpleNamespace(
            token_ids=self.output if final_only else new, finish_reason=self.reason
        )
        return SimpleNamespace(
            request_id=self.name,
            prompt_token_ids=self.prompt,
            outputs=[completion],
            finished=self.reason is not None,
            num_cached_tokens=self.num_cached,
            metrics=SimpleNamespace(scheduled_ts=self.scheduled_ts),
        )


class Layer(torch.nn.Module):
    """Weights as a dummy loader leaves them: numbers of at most 0.001, layer scalars among them.

    `other` is a parameter that no checkpoint names.
    """

    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.Parameter(torch.empty(32))
        self.other = torch.nn.Parameter(torch.empty(3))
        self.register_buffer("layer_scalar", torch.ones(1))
        with torch.no_grad():
            for tensor in (self.norm, self.layer_scalar):
                tensor.uniform_(-1e-3, 1e-3)
        self.seen: dict[str, torch.Tensor] = {}

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        self.seen = {name: weight.clone() for name, weight in weights}
        with torch.no_grad():
            self.norm.copy_(self.seen["model.norm.weight"])
            self.layer_scalar.copy_(self.seen["model.layers.0.layer_scalar"])
        return set(self.seen)


class BaseModelLoader:
    def __init__(self, load_config: Any) -> None:
        self.load_config = load_config


@dataclass
class LoadConfig:
    """Where weights come from."""

    load_format: str
    model_loader_extra_config: dict[str, Any] = field(default_factory=dict)


class DummyModelLoader(BaseModelLoader):
    """Leaves 0.5 everywhere, to be known again."""

    def load_weights(self, model: torch.nn.Module, model_config: Any) -> None:
        assert self.load_config == LoadConfig("dummy")
        for parameter in model.parameters():
            parameter.data.fill_(0.5)


class Worker:
    """One rank: finds its extension and its loader as vLLM 0.26 does."""

    def __init__(self, args: EngineArgs, loaders: dict[str, Any]) -> None:
        self.model = Layer()
        extension = getattr(args, "worker_extension_cls", "")
        if extension:
            module, _, name = extension.rpartition(".")
            sys.modules.pop(module, None)  # another fake's loader
            self.extension = getattr(importlib.import_module(module), name)()
        if args.load_format in loaders:
            load_config = SimpleNamespace(model_loader_extra_config=args.model_loader_extra_config)
            config = SimpleNamespace(
                model=args.model, dtype=getattr(torch, args.dtype), runner_type="generate"
            )
            loaders[args.load_format](load_config).load_weights(self.model, config)


class LLMEngine:
    """Steps all its requests, up to max_num_seqs at a time."""

    loaders: ClassVar[dict[str, Any]] = {}

    def __init__(self, args: EngineArgs, stat_loggers: Sequence[Any] | None = None) -> None:
        self.args = args
        self.requests: dict[str, FakeRequest] = {}
        self.aborted: list[str] = []
        self.counters = {"drafts": 0, "drafted": [0] * 8, "accepted": [0] * 8}
        self.is_shut_down = False
        self.num_resets = 0  # of the prefix cache
        self.num_encoder_resets = 0
        self.workers = [Worker(args, self.loaders) for _ in range(args.tensor_parallel_size)]
        self.engine_core = SimpleNamespace(shutdown=self._shut_down)
        mode = args.compilation_config["cudagraph_mode"]
        self.vllm_config = SimpleNamespace(
            model_config=SimpleNamespace(
                get_vocab_size=lambda: VOCAB_SIZE, max_model_len=args.max_model_len or 128
            ),
            cache_config=SimpleNamespace(block_size=4),
            compilation_config=SimpleNamespace(cudagraph_mode=SimpleNamespace(name=mode)),
            use_v2_model_runner=True,
        )
        runner = SimpleNamespace(model_memory_usage=1000)
        worker = SimpleNamespace(model_runner=runner, available_kv_cache_memory_bytes=500)
        self.model_executor = SimpleNamespace(driver_worker=worker)
        self.loggers = [make(self.vllm_config, 0) for make in stat_loggers or ()]
        for logger in self.loggers:
            logger.log_engine_initialized()

    @classmethod
    def from_engine_args(cls, args: EngineArgs, *, stat_loggers: Any = None) -> LLMEngine:
        return cls(args, stat_loggers)

    def collective_rpc(self, method: str) -> list[Any]:
        return [getattr(worker.extension, method)() for worker in self.workers]

    def add_request(self, name: str, prompt: dict[str, Any], params: Any) -> None:
        assert name not in self.requests
        self.requests[name] = FakeRequest(name, prompt["prompt_token_ids"], params)

    def reset_prefix_cache(self) -> bool:
        self.num_resets += 1
        return not self.requests

    def reset_encoder_cache(self) -> None:
        assert not self.requests
        self.num_encoder_resets += 1

    def abort_request(self, names: Sequence[str]) -> None:
        for name in names:
            self.aborted.append(name)
            self.requests.pop(name, None)

    def step(self) -> list[Any]:
        spec = self.args.speculative_config
        k = spec["num_speculative_tokens"] if spec else 0
        drafted, accepted, outputs = [0] * k, [0] * k, []
        running = list(self.requests.values())[: self.args.max_num_seqs]
        for request in running:
            new, width, count = request.advance(k, self.vllm_config.model_config.max_model_len)
            for i in range(width):
                drafted[i] += 1
                accepted[i] += i < count
            if request.reason is not None:
                del self.requests[request.name]
            final_only = request.params.output_kind is RequestOutputKind.FINAL_ONLY
            if request.reason is not None or not final_only:
                outputs.append(request.as_output(new))
        self._report(drafted, accepted, len(running))
        return outputs

    def _report(self, drafted: list[int], accepted: list[int], num_running: int) -> None:
        spec = None
        if sum(drafted):
            spec = SimpleNamespace(
                num_draft_tokens_per_pos=drafted, num_accepted_tokens_per_pos=accepted
            )
            for i, (offered, kept) in enumerate(zip(drafted, accepted, strict=True)):
                self.counters["drafted"][i] += offered
                self.counters["accepted"][i] += kept
            self.counters["drafts"] += drafted[0]
        scheduler = SimpleNamespace(
            num_running_reqs=num_running,
            num_waiting_reqs=len(self.requests) - num_running,
            kv_cache_usage=0.25,
            spec_decoding_stats=spec,
        )
        for logger in self.loggers:
            logger.record(scheduler, SimpleNamespace(num_preempted_reqs=0), None, engine_idx=0)

    def _shut_down(self) -> None:
        self.is_shut_down = True


class AsyncLLMEngine:
    """The same steps, one request's outputs at a time."""

    def __init__(self, args: EngineArgs) -> None:
        self.inner = LLMEngine(args)
        self.vllm_config = self.inner.vllm_config
        self.aborted: list[str] = []

    @classmethod
    def from_engine_args(cls, args: EngineArgs) -> AsyncLLMEngine:
        asyncio.get_running_loop()
        return cls(args)

    async def generate(self, prompt: Any, params: Any, name: str) -> AsyncIterator[Any]:
        request = FakeRequest(name, prompt["prompt_token_ids"], params)
        request.reason = None
        while request.reason is None:
            await asyncio.sleep(0)
            request.advance(0, self.vllm_config.model_config.max_model_len)
        yield request.as_output([])

    async def collective_rpc(self, method: str) -> list[Any]:
        return self.inner.collective_rpc(method)

    async def reset_prefix_cache(self) -> bool:
        return self.inner.reset_prefix_cache()

    async def reset_encoder_cache(self) -> None:
        self.inner.reset_encoder_cache()

    async def abort(self, names: Sequence[str]) -> None:
        self.aborted += names

    def shutdown(self) -> None:
        self.inner.is_shut_down = True


def install(monkeypatch: pytest.MonkeyPatch, version: str = "0.26.0") -> ModuleType:
    """Put the fake where `import vllm` finds it, on a machine that seems to have a GPU."""
    module = ModuleType("vllm")
    module.__version__ = version  # type: ignore[attr-defined]
    for kind in (EngineArgs, LLMEngine, SamplingParams, AsyncLLMEngine):
        setattr(module, kind.__name__, kind)
    module.AsyncEngineArgs = EngineArgs  # type: ignore[attr-defined]
    parameters = ModuleType("vllm.sampling_params")
    parameters.RequestOutputKind = RequestOutputKind  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    _install_loaders(monkeypatch)
    monkeypatch.setitem(sys.modules, "vllm.sampling_params", parameters)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    return module


def _install_loaders(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's registry of loaders, where worker.py imports it from."""
    found: dict[str, Any] = {}
    monkeypatch.setattr(LLMEngine, "loaders", found)

    def register(name: str) -> Any:
        return lambda loader: found.setdefault(name, loader)

    loader, config = ModuleType("model_loader"), ModuleType("config")
    loader.BaseModelLoader = BaseModelLoader  # type: ignore[attr-defined]
    loader.DummyModelLoader = DummyModelLoader  # type: ignore[attr-defined]
    loader.register_model_loader = register  # type: ignore[attr-defined]
    config.LoadConfig = LoadConfig  # type: ignore[attr-defined]
    below = "vllm.model_executor"
    monkeypatch.setitem(sys.modules, "vllm.config", config)
    monkeypatch.setitem(sys.modules, below, ModuleType("model_executor"))
    monkeypatch.setitem(sys.modules, f"{below}.model_loader", loader)
