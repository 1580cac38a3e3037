"""Block drafters by their definition: plain torch over a whole text, no cache, one request. Shares
no code with the engine.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from eagle_oracle import PlainEagle, frequencies, grown, norm, rotate
from torch import Tensor


@dataclass
class PlainBlock(PlainEagle):
    """DFlash: context features of all tokens before the newest, and a block that follows them."""

    block_size: int = 8
    samples_anchor: bool = False
    causal: dict[str, bool] = field(default_factory=dict)  # by kind of layer
    embed_scale: float = 1.0
    mask_embedding: Tensor | None = None

    def features(self, aux: list[Tensor]) -> Tensor:
        """[n, D] of the target's states, [n, D_target] each."""
        x = self.linear("fc", torch.cat(aux, -1))
        return norm(x, self.weights["hidden_norm.weight"], self.layer["rms_norm_eps"])

    # ------------------------------------------------------------------ DSpark

    def bias(self, token: Tensor, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Bias [V] of the logits after a token, at a row's state [D]; and the recurrent state."""
        w, kind = self.weights, self.flags["markov_head_type"]
        e = w["markov_head.markov_w1.weight"][token]
        latent = e
        if kind == "gated":
            latent = e * torch.sigmoid(self.linear("markov_head.gate_proj", torch.cat((hidden, e))))
        elif kind == "rnn":
            joint = self.linear("markov_head.joint_proj", torch.cat((state, e, hidden)))
            g, c, o = joint.chunk(3)
            g = torch.sigmoid(g)
            state, latent = g * state + (1 - g) * torch.tanh(c), torch.tanh(o)
        return w["markov_head.markov_w2.weight"] @ latent, state

    def confidence(self, token: Tensor, hidden: Tensor) -> Tensor:
        """Probability that the draft after a token is accepted, at a row's state [D]."""
        features = hidden
        if self.flags["confidence_head_with_markov"]:
            e = self.weights["markov_head.markov_w1.weight"][token]
            features = torch.cat((hidden, e))
        return torch.sigmoid(self.linear("confidence_head.proj", features))[0]

    def in_turn(self, text: Tensor, aux: list[Tensor], k: int) -> tuple[Tensor, Tensor, Tensor]:
        """Drafts [k] in view of each other, the tokens before them [k] and their rows [k, D]."""
        rows = self.block_states(text, aux, k, whole=True)
        token, state = text[-1], torch.zeros(self.flags["markov_rank"]).double()
        drafts, before = [], []
        for i, hidden in enumerate(rows):
            bias, state = self.bias(token, hidden, state)
            if i < len(rows) - k:  # the anchor's row drafts nothing
                continue
            before.append(token)
            best = (self.logits(hidden) + bias).argmax()
            token = best if self.ids is None else self.ids[best]
            drafts.append(token)
        return torch.stack(drafts), torch.stack(before), rows[-k:]

    # ------------------------------------------------------------------ DFlash2

    def convolved(self, name: str, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """A part's input, convolved, and what its rows add to the taps of both sides."""
        if f"{name}.base_kernel" not in self.weights:
            return x, None
        _, taps, size = self.weights[f"{name}.base_kernel"].shape
        added = self.linear(f"{name}.kernel_projection", x).view(len(x), 2, taps, -1)
        added = added.repeat_interleave(size // added.shape[3], 3)
        return self.convolve(name, 0, x, added), added

    def convolve(self, name: str, side: int, x: Tensor, added: Tensor | None) -> Tensor:
        """Each row plus what it takes of the rows before it, of the block alone."""
        if added is None:
            return x
        base = self.weights[f"{name}.base_kernel"][side]
        out = torch.zeros_like(x)
        for i in range(len(x)):
            for tap in range(min(len(base), i + 1)):
                out[i] += (base[tap] + added[i, side, tap]) * x[i - tap]
        return out

    def capped(self, hidden: Tensor) -> Tensor:
        """Logits [V] of a row [D] as the file scales and caps them."""
        cap, logits = self.flags["final_logit_softcapping"], self.logits(hidden)
        logits = logits * self.flags["output_multiplier"]
        return logits if cap is None else cap * torch.tanh(logits / cap)

    def selected(self, text: Tensor, aux: list[Tensor], k: int) -> tuple[Tensor, list[Tensor]]:
        """Drafts [k], each the best of its candidates after the one before it, and the candidates'
        scores."""
        w, found = self.weights, []
        token, every = text[-1], []
        for hidden in self.block_states(text, aux, k):
            latent = w["candidate_selector.predecessor_codebook"][token]
            latent = latent * self.linear("candidate_selector.hidden_projection", hidden)
            logits, ids = self.capped(hidden).topk(self.flags["selector_top_k"])
            scores = logits + w["candidate_selector.successor_codebook"][ids] @ latent
            token = ids[scores.argmax()]
            found.append(token)
            every.append(scores)
        return torch.stack(found), every

    def num_rows(self, k: int) -> int:
        return k if self.samples_anchor else k + 1

    def block_states(self, text: Tensor, aux: list[Tensor], k: int, whole: bool = False) -> Tensor:
        """States [k, D] of the rows that draft, behind `text`; aux are those of all its tokens but
        the newest."""
        eps, w, rows = self.layer["rms_norm_eps"], self.weights, self.num_rows(k)
        context = self.features(aux)
        start = len(context)
        ids = torch.full((rows,), self.mask_token)
        ids[0] = text[-1]
        x = w["embed_tokens.weight"][ids] * self.embed_scale
        if self.mask_embedding is not None:
            x[1:] = self.mask_embedding
        for i in range(self.layer["num_hidden_layers"]):
            name = f"layers.{i}"
            entering = norm(x, w[f"{name}.input_layernorm.weight"], eps)
            entering, kernel = self.convolved(f"{name}.attention_conv", entering)
            attended = self.block_attention(i, entering, context, start)
            x = x + self.convolve(f"{name}.attention_conv", 1, attended, kernel)
            inner = norm(x, w[f"{name}.post_attention_layernorm.weight"], eps)
            inner, kernel = self.convolved(f"{name}.mlp_conv", inner)
            gate = self.activate(self.linear(f"{name}.mlp.gate_proj", inner))
            out = self.linear(
                f"{name}.mlp.down_proj", gate * self.linear(f"{name}.mlp.up_proj", inner)
            )
            x = x + self.convolve(f"{name}.mlp_conv", 1, out, kernel)
        found = norm(x, w["norm.weight"], eps)
        return found if whole else found[-k:]

    def block_attention(self, i: int, x: Tensor, context: Tensor, start: int) -> Tensor:
        heads, kv_heads = self.layer["num_attention_heads"], self.layer["num_key_value_heads"]
        size, name, eps = (
            self.layer["head_dim"],
            f"layers.{i}.self_attn",
            self.layer["rms_norm_eps"],
        )
        places = torch.arange(start + len(x))
        both = torch.cat((context, x))
        q = self.linear(f"{name}.q_proj", x).view(-1, heads, size)
        k = self.linear(f"{name}.k_proj", both).view(-1, kv_heads, size)
        v = self.linear(f"{name}.v_proj", both).view(-1, kv_heads, size)
        q = norm(q, self.weights[f"{name}.q_norm.weight"], eps)
        k = norm(k, self.weights[f"{name}.k_norm.weight"], eps)
        q = rotate(q, places[start:], *frequencies(self.layer))
        q = grown(q, places[start:], self.layer.get("rope_scaling") or {})
        k = rotate(k, places, *frequencies(self.layer))
        k, v = (part.repeat_interleave(heads // kv_heads, 1) for part in (k, v))
        scores = torch.einsum("ihd,jhd->hij", q, k) * size**-0.5
        kinds = self.layer.get("layer_types") or ["full_attention"] * (i + 1)
        hidden = torch.zeros(len(x), len(places), dtype=torch.bool)
        if self.causal.get(kinds[i], False):
            hidden |= places[None] > places[start:, None]
        if kinds[i] == "sliding_attention":
            hidden |= places[None] < start - self.layer["sliding_window"]
        weights = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        out = torch.einsum("hij,jhd->ihd", weights, v).reshape(len(x), -1)
        return self.linear(f"{name}.o_proj", out)

    def draft(
        self,
        text: Tensor,
        aux: list[Tensor],
        final: Tensor,
        k: int,
        read: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Drafts [k] behind `text`, and the states they come from [k, D]."""
        if self.flags.get("markov_rank"):
            drafts, _, states = self.in_turn(text, aux, k)
            return drafts, states
        if self.flags.get("selector_rank"):
            return self.selected(text, aux, k)[0], self.block_states(text, aux, k)
        states = self.block_states(text, aux, k)
        return self.choose(states), states
