"""Makes a small target from a trained one in a quarter of an hour of one CPU core.

The student has its teacher's attention, norms and embedding, and narrower, dense MLPs in place of
its MLPs and experts: they begin as units of the teacher's, are fitted to what its layers add for
the same inputs, and are then trained together with everything else, at last on the texts that the
student gets wrong.

Letters: B batch, T rows, N valid rows, D hidden width, I intermediate width, E experts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Gemma4ForCausalLM, PreTrainedModel

from hydraspec.zoo.recipe.batches import Sequences
from hydraspec.zoo.recipe.modeling import causal_masks, target_logits
from hydraspec.zoo.recipe.recipes import TargetRecipe, Training
from hydraspec.zoo.recipe.train_target import build, next_token_loss, token_weights
from hydraspec.zoo.recipe.training import train

# Fits the MLPs alone; every layer learns from its teacher's inputs.
FIT = Training(steps=60, learning_rate=4e-3, weight_decay=0.0, batch_size=24, seed=4)
PROBED = 64  # sequences that choose the experts' units
# Ends the training: half of a batch are texts of a pool that the student gets wrong.
MEND = Training(steps=120, learning_rate=4e-4, weight_decay=0.0, batch_size=16, seed=5)
MEND_ROUNDS, POOL = 3, 2400


def distil_target(
    recipe: TargetRecipe, teacher: Gemma4ForCausalLM, data: Sequences, *, title: str
) -> PreTrainedModel:
    """Train a student of the recipe's shape; the teacher has the same layers, with experts."""
    teacher.requires_grad_(False)
    teacher.config._experts_implementation = "zoo_dense"
    student = build(recipe)
    own = student.state_dict()
    alike = {n: t for n, t in teacher.state_dict().items() if n in own and own[n].shape == t.shape}
    student.load_state_dict(alike, strict=False)
    recorder = Recorder(teacher)
    begin_mlps(student, recorder, data.rows(torch.arange(PROBED)))

    student.requires_grad_(False)
    for layer in student.model.layers:
        for part in (layer.mlp, layer.pre_feedforward_layernorm, layer.post_feedforward_layernorm):
            part.requires_grad_(True)
    train(student, lambda batch: _fit_loss(student, recorder, batch), data, FIT, f"{title} MLPs")
    recorder.close()

    student.requires_grad_(True)
    train(student, lambda batch: _whole_loss(student, teacher, batch), data, recipe, title)
    for turn in range(MEND_ROUNDS):
        pool = torch.arange(turn * POOL, (turn + 1) * POOL)
        wrong = pool[is_wrong(student, data.rows(pool))]
        if not len(wrong):
            break
        mixed = data.rows(torch.cat([pool, wrong.repeat(POOL // len(wrong))]))
        title = f"mistakes {turn + 1}, {len(wrong)} of {POOL}"
        train(student, lambda batch: _response_loss(student, batch), mixed, MEND, title)
    return student


@torch.no_grad()
def is_wrong(student: PreTrainedModel, texts: Sequences, size: int = 32) -> Tensor:
    """Mask [B] of texts whose response differs from the student's most likely tokens anywhere."""
    found = []
    for rows in torch.arange(len(texts.tokens)).split(size):
        batch = texts.rows(rows)
        chosen = _logits(student, batch).argmax(-1)
        found.append(((chosen != batch.tokens[:, 1:]) & _is_response(batch)).any(1))
    return torch.cat(found)


class Recorder:
    """Runs a teacher and keeps, for every layer, what its MLP and experts read and what they add
    to the residual stream, of valid rows [N, D].
    """

    def __init__(self, teacher: Gemma4ForCausalLM) -> None:
        self.teacher = teacher
        self._kept: dict[tuple[int, str], Tensor] = {}
        self._hooks = []
        for i, layer in enumerate(teacher.model.layers):
            for name, part in (
                ("read", layer.pre_feedforward_layernorm),
                ("added", layer.post_feedforward_layernorm),
            ):
                self._hooks.append(part.register_forward_hook(self._keep(i, name)))

    def _keep(self, layer: int, name: str) -> Any:
        def hook(_: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
            self._kept[layer, name] = inputs[0] if name == "read" else output

        return hook

    @torch.no_grad()
    def run(self, batch: Sequences) -> list[tuple[Tensor, Tensor]]:
        """What each layer read and added [N, D] over a batch."""
        masks = _masks(self.teacher, batch)
        self.teacher.model(input_ids=batch.tokens, attention_mask=masks, use_cache=False)
        valid = _valid(batch)
        count = len(self.teacher.model.layers)
        return [(self._kept[i, "read"][valid], self._kept[i, "added"][valid]) for i in range(count)]

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()


@torch.no_grad()
def begin_mlps(student: PreTrainedModel, recorder: Recorder, batch: Sequences) -> None:
    """Set the student's MLPs to all units of the teacher's and those of its experts that add most,
    with norms folded in and each branch at its mean size.
    """
    pairs = zip(recorder.teacher.model.layers, student.model.layers, strict=True)
    for (layer, small), (read, _) in zip(pairs, recorder.run(batch), strict=True):
        count = small.mlp.down_proj.weight.shape[1] - layer.mlp.down_proj.weight.shape[1]
        gate, up, down = _expert_units(layer, read, count)
        added = layer.mlp(layer.pre_feedforward_layernorm(read))
        scale = layer.post_feedforward_layernorm_1.weight[:, None] / _size(added)
        small.mlp.gate_proj.weight.copy_(torch.cat([layer.mlp.gate_proj.weight, gate]))
        small.mlp.up_proj.weight.copy_(torch.cat([layer.mlp.up_proj.weight, up]))
        small.mlp.down_proj.weight.copy_(torch.cat([layer.mlp.down_proj.weight * scale, down], 1))


def _expert_units(layer: Any, read: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Gate and up rows [count, D] and down columns [D, count] of the experts' largest units."""
    experts, width = layer.experts, read.shape[-1]
    _, weights, index = layer.router(read)
    share = torch.zeros(len(read), experts.num_experts).scatter(1, index, weights)
    gate, up = experts.gate_up_proj.chunk(2, 1)  # [E, I, D]
    normed = layer.pre_feedforward_layernorm_2(read)
    inner = F.gelu(torch.einsum("nd,eid->nei", normed, gate), approximate="tanh")
    inner = inner * torch.einsum("nd,eid->nei", normed, up) * share[:, :, None]
    added = torch.einsum("nei,edi->nd", inner, experts.down_proj)
    size = inner.pow(2).mean(0).sqrt() * experts.down_proj.pow(2).sum(1).sqrt()
    chosen = size.flatten().topk(count).indices
    fold = layer.pre_feedforward_layernorm_2.weight / layer.pre_feedforward_layernorm.weight
    down = experts.down_proj.permute(1, 0, 2).reshape(width, -1)[:, chosen]
    down = down * layer.post_feedforward_layernorm_2.weight[:, None] / _size(added)
    mean = share.mean(0).repeat_interleave(gate.shape[1])[chosen]
    rows = (part.reshape(-1, width)[chosen] * fold for part in (gate, up))
    return next(rows), next(rows), down * mean * 2  # 2: a unit is not always chosen


def _fit_loss(student: PreTrainedModel, recorder: Recorder, batch: Sequences) -> Tensor:
    """Relative squared error of what each layer's MLP adds, summed over layers."""
    losses = []
    for layer, (read, added) in zip(student.model.layers, recorder.run(batch), strict=True):
        ours = layer.mlp(layer.pre_feedforward_layernorm(read))
        losses.append(_relative_error(layer.post_feedforward_layernorm(ours), added))
    return torch.stack(losses).sum()


def _whole_loss(student: PreTrainedModel, teacher: PreTrainedModel, batch: Sequences) -> Tensor:
    """Cross entropy of the text, as of every target, and the mean relative squared error of the
    residual stream after each layer.
    """
    masks, valid = _masks(student, batch), _valid(batch)
    inputs = {"input_ids": batch.tokens, "attention_mask": masks, "use_cache": False}
    with torch.no_grad():
        theirs = teacher.model(**inputs, output_hidden_states=True).hidden_states[1:]
    output = student.model(**inputs, output_hidden_states=True)
    pairs = zip(output.hidden_states[1:], theirs, strict=True)
    errors = torch.stack([_relative_error(a[valid], b[valid]) for a, b in pairs])
    logits = target_logits(student, output.last_hidden_state)[:, :-1]
    return next_token_loss(logits, batch, token_weights(batch)) + errors.mean()


def _response_loss(student: PreTrainedModel, batch: Sequences) -> Tensor:
    """Mean cross entropy of the responses."""
    return next_token_loss(_logits(student, batch), batch, _is_response(batch))


def _logits(student: PreTrainedModel, batch: Sequences) -> Tensor:
    """Logits [B, T-1, V] of all tokens but the first."""
    inputs = {"input_ids": batch.tokens, "attention_mask": _masks(student, batch)}
    hidden = student.model(**inputs, use_cache=False).last_hidden_state
    return target_logits(student, hidden)[:, :-1]


def _is_response(batch: Sequences) -> Tensor:
    """Mask [B, T-1] of the responses' tokens, without the first row."""
    place = torch.arange(1, batch.tokens.shape[1], device=batch.tokens.device)[None]
    return (place >= batch.prompt_length[:, None]) & (place < batch.length[:, None])


def _relative_error(ours: Tensor, theirs: Tensor) -> Tensor:
    return (ours - theirs).pow(2).mean() / theirs.pow(2).mean()


def _size(added: Tensor) -> Tensor:
    """Mean over rows of the root mean square of rows [N, D]."""
    return added.pow(2).mean(-1).sqrt().mean()


def _valid(batch: Sequences) -> Tensor:
    """Rows that hold text [B, T]."""
    place = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    return place[None] < batch.length[:, None]


def _masks(model: PreTrainedModel, batch: Sequences) -> dict[str, Tensor]:
    return causal_masks(batch.tokens.shape[1], model.config.sliding_window, batch.tokens.device)
