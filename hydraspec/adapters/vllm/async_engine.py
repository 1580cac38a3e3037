"""Data parallel vLLM: its asynchronous engine, which spreads requests over copies of the model,
with the calls of its synchronous one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

LONGEST_STEP_S = 0.01


def start_data_parallel(arguments: dict[str, Any]) -> DataParallel:
    """Starts a data parallel vLLM engine with EngineArgs' keyword arguments."""
    from vllm import AsyncEngineArgs, AsyncLLMEngine

    loop = asyncio.new_event_loop()

    async def start() -> Any:  # the engine starts its tasks in the running loop
        return AsyncLLMEngine.from_engine_args(AsyncEngineArgs(**arguments))

    try:
        return DataParallel(loop, loop.run_until_complete(start()))
    except BaseException:
        loop.close()
        raise


class DataParallel:
    """vLLM's asynchronous engine with the calls of its synchronous one.

    A "step" waits for the next outputs of any copy of the model, for LONGEST_STEP_S at most, since
    requests may arrive meanwhile.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, engine: Any) -> None:
        self.vllm_config = engine.vllm_config
        self._loop, self._engine = loop, engine
        self._outputs: asyncio.Queue[Any] = asyncio.Queue()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def add_request(self, request_id: str, prompt: Any, params: Any) -> None:
        """Offers a request. If vLLM refuses the request, `step` raises the error."""
        run = self._listen(request_id, prompt, params)
        self._tasks[request_id] = self._loop.create_task(run)

    def step(self) -> list[Any]:
        """Outputs that have arrived since the last step. Raises vLLM's errors of requests."""
        return self._loop.run_until_complete(self._wait())

    def abort_request(self, request_ids: Sequence[str]) -> None:
        """Drops requests, and all outputs that `step` has not returned."""
        tasks = [self._tasks.pop(name) for name in request_ids if name in self._tasks]
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(self._abort(list(request_ids), tasks))

    def reset_prefix_cache(self) -> bool | None:
        """Empties the prefix cache of every copy; False if some cache could not be emptied."""
        found: bool | None = self._loop.run_until_complete(self._engine.reset_prefix_cache())
        return found

    def reset_encoder_cache(self) -> None:
        """Forgets the encoder outputs of images in every copy."""
        self._loop.run_until_complete(self._engine.reset_encoder_cache())

    def collective_rpc(self, method: str) -> list[Any]:
        """Results of a method of the workers, by worker."""
        found: list[Any] = self._loop.run_until_complete(self._engine.collective_rpc(method))
        return found

    def shutdown(self) -> None:
        """Stops the processes and the loop."""
        self.abort_request(list(self._tasks))
        self._engine.shutdown()
        self._loop.close()

    async def _listen(self, request_id: str, prompt: Any, params: Any) -> None:
        try:
            async for output in self._engine.generate(prompt, params, request_id):
                self._outputs.put_nowait(output)
        except Exception as error:
            self._outputs.put_nowait(error)
        finally:
            self._tasks.pop(request_id, None)

    async def _wait(self) -> list[Any]:
        outputs: list[Any] = []
        with suppress(TimeoutError):
            outputs.append(await asyncio.wait_for(self._outputs.get(), LONGEST_STEP_S))
        while not self._outputs.empty():
            outputs.append(self._outputs.get_nowait())
        for output in outputs:
            if isinstance(output, Exception):
                raise output
        return outputs

    async def _abort(self, request_ids: list[str], tasks: list[asyncio.Task[None]]) -> None:
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._engine.abort(request_ids)
        while not self._outputs.empty():
            self._outputs.get_nowait()
