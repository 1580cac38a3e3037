"""A search for the damaged part of a head: each part is trained alone for a few steps.

The training loss is that of drafters, the cross entropy with the target's distribution, on some of
the texts; accepted drafts are counted on the others. If a part is damaged, training it raises
acceptance much. In a healthy or an undertrained head no part raises it much when trained alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from hydraspec.analysis.doctor.parts import derive, module_of, weights_of
from hydraspec.analysis.doctor.scores import likelihood, score
from hydraspec.config.drafts import MAX_SPECULATIVE_TOKENS
from hydraspec.models.base import TargetModel
from hydraspec.speculators.teacher_forcing.scores import DraftVocabulary
from hydraspec.speculators.teacher_forcing.texts import Texts, read_texts
from hydraspec.speculators.teacher_forcing.trial import Trial, draft_states

STEPS = 4  # L-BFGS steps for every part
MORE_STEPS, FINALISTS = 12, 3  # steps for the parts that gained most with STEPS
TRAINED_TEXTS = 16  # texts for training, at most half of all; the others are for counting
# Drafts in the loss, by Trial.kind. One uses all weights of a head with its own cache and costs
# least; the weights for P-EAGLE's masks and for feedback are used from the second draft on.
# A block's states depend on its length, so that all of its drafts are.
TRAINED_DRAFTS = {"own_cache": 1, "parallel": 2, "target_cache": 2, "block": MAX_SPECULATIVE_TOKENS}


@dataclass(slots=True, frozen=True, kw_only=True)
class Retrained:
    """A head after a few training steps on one part, measured on texts that were not trained on.

    Attributes:
        module: the trained part, see parts.module_of.
        tensor: the weight of that part whose change lowered the training loss most.
        acceptance: acceptance length after the training.
        before: acceptance length before it, on the same texts.
        drafts: gain in drafts accepted per start.
        probability: gain in the probability of the target's token, mean over all drafts.
    """

    module: str
    tensor: str
    acceptance: float
    before: float
    drafts: float
    probability: float

    @property
    def gain(self) -> float:
        """Relative gain in acceptance length: 0.1 is 10 % more than before."""
        return self.acceptance / self.before - 1


def retrained(trial: Trial, target: TargetModel, texts: Texts, k: int) -> list[Retrained]:
    """Train each part of a head alone, and restore it afterwards. Returns the parts by drafts
    gained, most first; an empty list on a GPU, whose kernels have no gradients.
    """
    if texts.final.is_cuda:
        return []
    apart = max(2, len(texts.texts) // TRAINED_TEXTS)
    rest = [text for i, text in enumerate(texts.texts) if i % apart]
    keep = sorted(texts.states)
    train, held_out = (
        read_texts(target, some, k=k, keep=keep, encode=texts.encode)
        for some in (texts.texts[::apart], rest)
    )
    base = score(trial, held_out, k)
    by_module: dict[str, dict[str, Tensor]] = {}
    for name, weight in weights_of(trial.head).items():
        by_module.setdefault(module_of(name), {})[name] = weight

    def after(module: str, steps: int) -> Retrained:
        with _kept(trial.head, by_module[module]):
            tensor = _train(
                trial, train, min(k, TRAINED_DRAFTS[trial.kind]), by_module[module], steps
            )
            found = score(trial, held_out, k)
        return Retrained(
            module=module,
            tensor=tensor,
            acceptance=found.acceptance,
            before=base.acceptance,
            drafts=found.accepted_per_start - base.accepted_per_start,
            probability=float(found.probs.mean() - base.probs.mean()),
        )

    first = sorted((after(module, STEPS) for module in by_module), key=lambda each: -each.drafts)
    longer = [after(each.module, MORE_STEPS) for each in first[:FINALISTS]]
    best = {each.module: each for each in sorted((*first, *longer), key=lambda each: each.drafts)}
    return sorted(best.values(), key=lambda each: -each.drafts)


@contextmanager
def _kept(head: Any, weights: Mapping[str, Tensor]) -> Iterator[None]:
    kept = {name: weight.clone() for name, weight in weights.items()}
    try:
        yield
    finally:
        for name, weight in weights.items():
            weight.copy_(kept[name])
        derive(head)


def _train(trial: Trial, texts: Texts, k: int, weights: Mapping[str, Tensor], steps: int) -> str:
    """Train some weights in place with L-BFGS; their changes are measured in units of their root
    mean square. Returns the name of the weight whose change lowered the loss most, to first order.
    """
    start = {name: w.clone() for name, w in weights.items()}
    sizes = {n: max(float(w.square().mean().sqrt()), _usual_size(w)) for n, w in start.items()}
    changes = {name: w.new_zeros(w.shape) for name, w in start.items()}
    slopes: dict[str, Tensor] = {}

    @torch.no_grad()
    def put() -> None:
        for name, w in weights.items():
            w.copy_(start[name] + sizes[name] * changes[name])

    def loss() -> float:
        put()
        value, found = _loss(trial, texts, k, weights)
        for name, change in changes.items():
            slope = found.get(name)
            scaled = torch.zeros_like(change) if slope is None else sizes[name] * slope
            change.grad = scaled.contiguous()
            slopes.setdefault(name, change.grad.clone())
        return value

    torch.optim.LBFGS(
        list(changes.values()), max_iter=steps, max_eval=2 * steps, line_search_fn="strong_wolfe"
    ).step(loss)
    put()
    derive(trial.head)
    gained = {name: -float((slopes[name] * change).sum()) for name, change in changes.items()}
    return max(gained, key=gained.__getitem__)


def _usual_size(w: Tensor) -> float:
    """The usual root mean square of a weight [out, in] at initialisation, 1 / sqrt(in); 1 for a
    norm. It is the least unit, so that a weight that is zero can be trained too.
    """
    return 1.0 if w.dim() < 2 else float(w.shape[-1] ** -0.5)


def _copied(saved: Tensor) -> Tensor:
    """A copy of a tensor saved for backward: layers change their residual stream in place."""
    return saved.detach().clone()


def _as_it_is(saved: Tensor) -> Tensor:
    return saved


def _loss(
    trial: Trial, texts: Texts, k: int, weights: Mapping[str, Tensor]
) -> tuple[float, dict[str, Tensor]]:
    """The mean cross entropy per draft, in nats, of the drafter's distribution with the target's,
    and its gradients by name; weights without influence on it are left out.
    """
    whole = {name: w if w._base is None else w._base for name, w in weights.items()}
    for tensor in whole.values():
        tensor.requires_grad_(True)
    with torch.enable_grad(), saved_tensors_hooks(_copied, _as_it_is):
        derive(trial.head)
        vocabulary = DraftVocabulary.of(trial.head, texts.vocab_size)
        sums = [
            likelihood(vocabulary, texts, part, part.logits(trial.head)).sum()
            for part in draft_states(trial, texts, k)
        ]
        loss = -torch.stack(sums).sum() / texts.chains.count / k
        if loss.requires_grad:  # false for centroids, which only select tokens
            loss.backward()
    found = {}
    for name, weight in weights.items():
        tensor = whole[name]
        if tensor.grad is not None:
            found[name] = tensor.grad.as_strided(
                weight.shape, weight.stride(), weight.storage_offset()
            )
    for tensor in whole.values():
        tensor.requires_grad_(False)
        tensor.grad = None
    return float(loss.detach()), found
