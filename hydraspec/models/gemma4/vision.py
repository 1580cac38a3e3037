"""Gemma 4's image encoders: the vision tower of the released sizes, and the projection of patches
of the 12B, which has no tower.

Both yield one embedding per token of an image, as wide as the text model's and unscaled. They are
computed whole on every rank that embeds tokens. Letters: n images, N patches of the largest one,
E width of the encoder.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from hydraspec.models.gemma4.vision_config import PatchShape, TowerShape, UnifiedShape
from hydraspec.models.image_batch import ImageBatch, batches, fault, largest_image
from hydraspec.models.layers import Norm
from hydraspec.models.linear import Linear
from hydraspec.models.parts import Weights
from hydraspec.models.place import Place
from hydraspec.types import Image

LAYER_NORM_EPS = 1e-5  # of the 12B's norms with mean and bias, as torch has it
# Without cuDNN's, which plans for every new shape: 60 to 870 ms each (torch 2.11, H200).
ATTENTIONS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
PREFIXES = ("vision_tower.", "vision_embedder.", "embed_vision.")  # of names in a checkpoint


class ImageEncoder(Weights):
    """The base of both encoders: a batch's tokens, then the projection to the text's width."""

    shape: PatchShape

    def __init__(self, shape: PatchShape, width: int, text_size: int, place: Place) -> None:
        """width: of the tokens before the projection."""
        self.shape, self.dtype, self.device = shape, place.dtype, place.device
        self.wide, self.is_held = place.wide, place.device.type != "meta"
        self.projection = Linear(place, width, {"embedding_projection": text_size})

    def fault(self, image: Image) -> str | None:
        """Words for what makes an image unreadable; None: it is sound."""
        shape = self.shape
        return fault(image, shape.pool, shape.patch_values, shape.num_positions)

    def encode(self, images: Sequence[Image]) -> list[Tensor]:
        """Embeddings [tokens, D] of each image, which has no `fault`. No result of the device is
        waited for.
        """
        found: list[Tensor] = []
        for batch in batches(images, self.shape.pool, self.wide, self.device):
            x = self.tokens(batch).to(self.dtype)
            x = self.projection.by_library(F.rms_norm(x, x.shape[1:], eps=self.shape.eps))
            found += x.split(batch.num_tokens)
        return found

    def largest_image(self) -> Image:
        """A black image that takes as much memory to encode as any images together."""
        shape = self.shape
        return largest_image(shape.pool, shape.patch_values, shape.num_positions)

    def finish(self) -> None:
        """Computes derived weights, if there are any; call once after the weights are filled."""

    def tokens(self, batch: ImageBatch) -> Tensor:
        """Tokens [M, E] of a batch, before the projection's norm."""
        raise NotImplementedError


def _normed(x: Tensor, norm: Norm) -> Tensor:
    """Norm of x [..., E]; torch computes it in float32 or wider and rounds once."""
    return F.rms_norm(x, norm.weight.shape, norm.weight, norm.eps)


# ------------------------------------------------------------------------------------------- tower


class ClippedLinear(Weights):
    """A linear map that clamps what it reads and what it yields, where the encoder has bounds."""

    names: Mapping[str, str] = {
        "linear": "",
        "input_min": "input_min",
        "input_max": "input_max",
        "output_min": "output_min",
        "output_max": "output_max",
    }

    def __init__(self, inputs: int, outputs: int, place: Place, *, clipped: bool) -> None:
        self.linear = Linear(place, inputs, {"linear": outputs})
        self.input_min, self.input_max, self.output_min, self.output_max = (
            place.empty() if clipped else None for _ in range(4)
        )
        # Input and output bounds as host numbers, set by `finish`: bounds on the device take a
        # kernel that reads them for every value.
        self.bounds: tuple[float, ...] | None = None

    def finish(self) -> None:
        """Reads the bounds; call once after the weights are filled."""
        if self.input_min is not None:
            bounds = (self.input_min, self.input_max, self.output_min, self.output_max)
            self.bounds = tuple(float(bound) for bound in bounds if bound is not None)

    def forward(self, x: Tensor) -> Tensor:
        """Output [T, n] for x [T, k]."""
        if self.bounds is None:
            assert self.input_min is None, "call finish() first: the bounds are not read yet"
            return self.linear.by_library(x)
        input_min, input_max, output_min, output_max = self.bounds
        x = self.linear.by_library(x.clamp(input_min, input_max))
        return x.clamp_(output_min, output_max)


class TowerLayer(Weights):
    """A layer of the tower: sandwich norms around attention and a gated MLP."""

    names: Mapping[str, str] = {
        "q": "self_attn.q_proj.",
        "k": "self_attn.k_proj.",
        "v": "self_attn.v_proj.",
        "out": "self_attn.o_proj.",
        "q_norm": "self_attn.q_norm.",
        "k_norm": "self_attn.k_norm.",
        "gate": "mlp.gate_proj.",
        "up": "mlp.up_proj.",
        "down": "mlp.down_proj.",
        "input_norm": "input_layernorm.",
        "post_attention_norm": "post_attention_layernorm.",
        "pre_mlp_norm": "pre_feedforward_layernorm.",
        "post_mlp_norm": "post_feedforward_layernorm.",
    }

    def __init__(self, shape: TowerShape, place: Place) -> None:
        size, inner, clipped = shape.hidden_size, shape.intermediate_size, shape.clipped
        queries, kv = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        self.head_dim, self.shares_heads = shape.head_dim, kv != queries
        self.q = ClippedLinear(size, queries, place, clipped=clipped)
        self.k = ClippedLinear(size, kv, place, clipped=clipped)
        self.v = ClippedLinear(size, kv, place, clipped=clipped)
        self.out = ClippedLinear(queries, size, place, clipped=clipped)
        self.gate = ClippedLinear(size, inner, place, clipped=clipped)
        self.up = ClippedLinear(size, inner, place, clipped=clipped)
        self.down = ClippedLinear(inner, size, place, clipped=clipped)
        self.q_norm, self.k_norm = (Norm(shape.head_dim, shape.eps, place) for _ in range(2))
        self.input_norm, self.post_attention_norm, self.pre_mlp_norm, self.post_mlp_norm = (
            Norm(size, shape.eps, place) for _ in range(4)
        )

    def forward(self, h: Tensor, turn: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        """The stream after the layer, for h [n, N, E]; turn: cosines and sines [n, N, 1, H]; mask
        [n, 1, 1, N]: the patches that every patch sees, None for all of them.
        """
        x = self.attend(_normed(h, self.input_norm), turn, mask)
        h = h + _normed(x, self.post_attention_norm)
        x = _normed(h, self.pre_mlp_norm).flatten(0, 1)
        x = F.gelu(self.gate.forward(x), approximate="tanh") * self.up.forward(x)
        return h + _normed(self.down.forward(x), self.post_mlp_norm).view(h.shape)

    def attend(self, x: Tensor, turn: tuple[Tensor, Tensor], mask: Tensor | None) -> Tensor:
        """The attention's output [n, N, E] for x [n, N, E], normed; the scores have no scale."""
        n, flat = x.shape[0], x.flatten(0, 1)
        q, k, v = (
            each.forward(flat).view(
                n, -1, each.linear.weight.shape[1] // self.head_dim, self.head_dim
            )
            for each in (self.q, self.k, self.v)
        )
        q, k = _turned(_normed(q, self.q_norm), turn), _turned(_normed(k, self.k_norm), turn)
        v = F.rms_norm(v, v.shape[-1:], eps=self.q_norm.eps)
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        found = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=1.0, enable_gqa=self.shares_heads
        )
        return self.out.forward(found.transpose(1, 2).flatten(2).flatten(0, 1)).view(x.shape)


def _turned(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    """Heads x [n, N, heads, H], of which the first half turns by columns, the other by rows; a half
    pairs its entry i with the one a quarter of H later.
    """
    cos, sin = turn
    a, b, c, d = x.chunk(4, -1)
    return x * cos + torch.cat((-b, a, -d, c), -1) * sin


class VisionTower(ImageEncoder):
    """The encoder of the sizes with a tower: patches see each other, then 3 * 3 of them become a
    token.
    """

    names: Mapping[str, str] = {
        "patch_projection": "vision_tower.patch_embedder.",
        "position_table": "vision_tower.patch_embedder.position_embedding_table",
        "layers": "vision_tower.encoder.layers.",
        "std_bias": "vision_tower.std_bias",
        "std_scale": "vision_tower.std_scale",
        "projection": "embed_vision.",
    }
    shape: TowerShape

    def __init__(self, shape: TowerShape, text_size: int, place: Place) -> None:
        super().__init__(shape, shape.hidden_size, text_size, place)
        size = shape.hidden_size
        self.patch_projection = Linear(place, shape.patch_values, {"input_proj": size})
        self.position_table = place.empty(2, shape.num_positions, size)
        self.layers = [TowerLayer(shape, place) for _ in range(shape.num_layers)]
        self.std_bias, self.std_scale = (
            place.empty(size) if shape.standardised else None for _ in range(2)
        )
        half = shape.head_dim // 2
        exponents = torch.arange(0, half, 2, dtype=torch.float32) / half
        self.frequencies = (1.0 / shape.theta**exponents).to(place.device)

    def finish(self) -> None:
        for layer in self.layers:
            for linear in (layer.q, layer.k, layer.v, layer.out, layer.gate, layer.up, layer.down):
                linear.finish()

    def tokens(self, batch: ImageBatch) -> Tensor:
        """Tokens [M, E]: mean of a token's patches after the last layer, times sqrt(E)."""
        x = self.patch_projection.by_library((2 * (batch.patches - 0.5)).to(self.dtype))
        column, row = batch.positions.unbind(1)
        x = x + (self.position_table[0, column] + self.position_table[1, row])
        h, mask = x[None], None
        if batch.is_padding is not None:
            mask = ~batch.is_padding[:, None, None]
            h = x.view(*batch.is_padding.shape, -1)
        elif len(batch.num_tokens) > 1:
            h = x.view(len(batch.num_tokens), -1, x.shape[1])
        turn = self._turn(batch.positions.view(*h.shape[:2], 2))
        with sdpa_kernel(ATTENTIONS):
            for layer in self.layers:
                h = layer.forward(h, turn, mask)
        pooled = h.flatten(0, 1)[batch.cells].to(self.wide).mean(1) * math.sqrt(
            self.shape.hidden_size
        )
        if self.std_bias is not None and self.std_scale is not None:
            pooled = (pooled - self.std_bias.to(self.wide)) * self.std_scale.to(self.wide)
        return pooled

    def _turn(self, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines [n, N, 1, H] of positions [n, N, 2]."""
        angles = positions[..., None].float() * self.frequencies  # [n, N, 2, H/4]
        angles = angles[:, :, :, None].expand(-1, -1, -1, 2, -1).flatten(2)[:, :, None]
        return angles.cos().to(self.dtype), angles.sin().to(self.dtype)


# ----------------------------------------------------------------------------------------- unified


class LayerNorm(Weights):
    """Norm with mean, weight and bias."""

    names: Mapping[str, str] = {"weight": "weight", "bias": "bias"}

    def __init__(self, size: int, place: Place) -> None:
        self.weight, self.bias = place.empty(size), place.empty(size)

    def forward(self, x: Tensor) -> Tensor:
        """Norm of x [T, size]."""
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, LAYER_NORM_EPS)


class PatchEmbedder(ImageEncoder):
    """The 12B's reading of an image: a token is the projection of a large patch, plus embeddings of
    its column and row, between norms.
    """

    names: Mapping[str, str] = {
        "patch_norm": "vision_embedder.patch_ln1.",
        "patch_projection": "vision_embedder.",
        "embed_norm": "vision_embedder.patch_ln2.",
        "position_table": "vision_embedder.pos_embedding",
        "position_norm": "vision_embedder.pos_norm.",
        "projection": "embed_vision.",
    }
    shape: UnifiedShape

    def __init__(self, shape: UnifiedShape, text_size: int, place: Place) -> None:
        width = shape.embed_size
        super().__init__(shape, width, text_size, place)
        self.patch_norm = LayerNorm(shape.patch_values, place)
        self.patch_projection = Linear(place, shape.patch_values, {"patch_dense": width}, bias=True)
        self.embed_norm = LayerNorm(width, place)
        self.position_table = place.empty(shape.num_positions, 2, width)
        self.position_norm = LayerNorm(width, place)

    def tokens(self, batch: ImageBatch) -> Tensor:
        """Tokens [M, E], one for each patch."""
        patches = batch.cells.squeeze(1)
        x = self.patch_norm.forward(batch.patches[patches].to(self.dtype))
        x = self.embed_norm.forward(self.patch_projection.by_library(x))
        column, row = batch.positions[patches].unbind(1)
        x = x + (self.position_table[column, 0] + self.position_table[row, 1])
        return self.position_norm.forward(x)


def build_encoder(
    shape: TowerShape | UnifiedShape | None, text_size: int, place: Place
) -> VisionTower | PatchEmbedder | None:
    """The empty encoder of a shape; None where the model has none. text_size: D."""
    if shape is None:
        return None
    kind = VisionTower if isinstance(shape, TowerShape) else PatchEmbedder
    return kind(shape, text_size, place)  # type: ignore[arg-type]


def name_in_encoder(name: str) -> str:
    """An encoder's tensor by the name that released files give it. transformers' own modules of the
    12B have other names, which files may carry too.
    """
    inner = name.removeprefix("embed_vision.")
    if inner == name or inner.startswith("embedding_projection."):
        return name
    if inner.startswith("multimodal_embedder."):
        return "embed_vision." + inner.removeprefix("multimodal_embedder.")
    return "vision_embedder." + inner
