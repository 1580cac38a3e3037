"""Shared parts of all training: optimiser, schedule, CUDA-graphed steps,
progress."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Protocol, Self, TypeVar

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch import Tensor, nn

from hydraspec.zoo.recipe.recipes import Training

log = logging.getLogger(__name__)

LOG_EVERY = 50


class Data(Protocol):
    """Examples of which batches are drawn."""

    @property
    def tokens(self) -> Tensor:
        """A tensor on the data's device."""

    def sample(self, batch_size: int, generator: torch.Generator, /) -> Self:
        """A batch drawn with replacement."""

    def copy_(self, other: Self, /) -> None:
        """Overwrite the tensors in place, as a captured CUDA graph needs."""


D = TypeVar("D", bound=Data)


def make_optimiser(model: nn.Module, training: Training, device: torch.device) -> torch.optim.AdamW:
    """AdamW with decay on matrices only; the rate is a tensor so that a graph can read it."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": training.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    on_gpu = device.type == "cuda"
    learning_rate = torch.zeros((), device=device)
    return torch.optim.AdamW(
        groups, lr=learning_rate, betas=(0.9, 0.98), fused=True, capturable=on_gpu
    )


def _make_step(
    model: nn.Module, loss_of: Callable[[D], Tensor], optimiser: torch.optim.AdamW, static: D
) -> Callable[[], Tensor]:
    """A training step over the static batch, which returns the loss; on a GPU, one CUDA graph."""
    parameters = [p for group in optimiser.param_groups for p in group["params"]]
    device = static.tokens.device

    def step() -> Tensor:
        optimiser.zero_grad(set_to_none=True)
        with torch.autocast(
            device.type, torch.bfloat16, device.type == "cuda", cache_enabled=False
        ):
            loss = loss_of(static)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimiser.step()
        return loss.detach()

    if device.type != "cuda":
        return step
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # the rate is still zero: warm-up changes no weight
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = step()

    def replay() -> Tensor:
        graph.replay()
        return result

    return replay


def train(
    model: nn.Module,
    loss_of: Callable[[D], Tensor],
    data: D,
    training: Training,
    title: str,
    *,
    max_seconds: float | None = None,
) -> None:
    """Train the model in place; `max_seconds` shortens the schedule on a slow device."""
    device = data.tokens.device
    generator = torch.Generator(device).manual_seed(training.seed)
    optimiser = make_optimiser(model, training, device)
    learning_rate = optimiser.param_groups[0]["lr"]
    static = data.sample(training.batch_size, generator)
    start = time.monotonic()
    step_once = _make_step(model, loss_of, optimiser, static)
    log.info("%s: ready after %.1f s", title, time.monotonic() - start)
    start, total, last = time.monotonic(), torch.zeros((), device=device), float("nan")
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(
        *columns, TimeRemainingColumn(), disable=not log.isEnabledFor(logging.INFO)
    ) as bar:
        task = bar.add_task(title, total=training.steps)
        for step in range(training.steps):
            progress = _progress(step / training.steps, time.monotonic() - start, max_seconds)
            if progress >= 1:
                break
            batch = data.sample(training.batch_size, generator)
            static.copy_(batch)
            learning_rate.fill_(training.rate(step, progress))
            total += step_once()
            if (step + 1) % LOG_EVERY == 0:
                last = total.item() / LOG_EVERY
                total.zero_()
                bar.update(task, completed=step + 1, description=f"{title} loss {last:.4f}")
                if (step + 1) % (20 * LOG_EVERY) == 0:
                    spent = time.monotonic() - start
                    log.info("%s: step %d loss %.4f, %.0f s", title, step + 1, last, spent)
    log.info("%s: final loss %.4f", title, last)


def _progress(share: float, elapsed: float, max_seconds: float | None) -> float:
    """The finished share of training by steps or by time, whichever is further."""
    return share if max_seconds is None else max(share, elapsed / max_seconds)
