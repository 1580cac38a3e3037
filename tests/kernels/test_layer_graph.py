"""A layer's small kernels in a chain on a GPU: captured, launched dependently, and in order."""

import pytest
import torch
from hydraspec_kernels.activation import gated_activation
from hydraspec_kernels.attention import Projection, QkvShape, write_qkv
from hydraspec_kernels.embedding import embed, ple_inputs
from hydraspec_kernels.moe import moe, route, route_grouped
from hydraspec_kernels.norms import add_norm, rms_norm
from hydraspec_kernels.rope import apply_rope, mirrored, rope_frequencies, rope_table
from torch import Tensor

pytestmark = pytest.mark.gpu

EPS = 1e-6
WIDTH, HEADS, KV_HEADS, HEAD, INNER, EXPERTS, LAYERS = 512, 4, 2, 128, 256, 16, 12
VOCAB, CACHE_ROWS = 300, 300
SHAPE = QkvShape(num_heads=HEADS, num_kv_heads=KV_HEADS, head_dim=HEAD, eps=EPS, value_norm=True)
THETA = rope_frequencies(HEAD, 1e4)


class World:
    """Weights, a cache, and one step over them that touches every operation many times."""

    def __init__(self, dtype: torch.dtype) -> None:
        draw = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return (torch.randn(shape, generator=draw) * shape[-1] ** -0.5).to("cuda", dtype)

        self.table, self.ple_table = normal(VOCAB, WIDTH), normal(VOCAB, LAYERS * 64)
        self.ple_projected, self.ple_weight = normal(VOCAB, LAYERS * 64), normal(64)
        self.norms = [normal(WIDTH) * 20 for _ in range(2)]
        self.qkv = normal(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD)
        self.router, self.scale = normal(WIDTH, EXPERTS), normal(EXPERTS).abs() + 1
        self.gate_up = normal(EXPERTS, 2 * INNER, WIDTH).transpose(1, 2)
        self.down = normal(EXPERTS, WIDTH, INNER).transpose(1, 2)
        self.theta = mirrored(THETA.to("cuda"))
        self.cache = torch.zeros(CACHE_ROWS, 2, KV_HEADS, HEAD, dtype=dtype, device="cuda")

    def step(self, ids: Tensor, positions: Tensor, slots: Tensor, *, synchronized: bool) -> Tensor:
        """synchronized: the device finishes each operation before the next is launched."""

        def done(x: Tensor) -> Tensor:
            if synchronized:
                torch.cuda.synchronize()
            return x

        post, following = self.norms
        h = done(embed(ids, self.table, 3.0))
        cos, sin = rope_table(positions, self.theta, h.dtype)
        projected = self.ple_projected[: ids.shape[0]]
        scales = {"table_scale": 8.0, "projection_scale": 0.5, "eps": EPS}
        inputs = done(ple_inputs(ids, self.ple_table, projected, self.ple_weight, **scales))
        y = done(rms_norm(h, following, EPS))
        for layer in range(LAYERS):
            projection = Projection(done(y @ self.qkv), cos, sin, slots)
            q = done(write_qkv(projection, self.cache, SHAPE))
            q = done(apply_rope(q, cos, sin))
            parts = torch.stack((q.flatten(1).float(), -0.5 * q.flatten(1).float()))
            h, y = done_pair(
                add_norm(h, parts, post_weight=post, next_weight=following, eps=EPS), synchronized
            )
            logits = done(y @ self.router)
            weights, chosen = route(logits, 3, self.scale)
            done(weights)
            grouped, _ = route_grouped(logits.float(), self.scale.float(), 3, 4, 2)
            mixed = done(moe(y, weights * done(grouped), chosen, self.gate_up, self.down))
            gates = torch.cat((mixed, h), -1)
            mixed = done(gated_activation(gates)) + done(gated_activation(gates, "silu"))
            mixed[:, :64] += inputs[:, layer]
            h, y = done_pair(
                add_norm(h, mixed, post_weight=post, next_weight=following, eps=EPS, scale=0.9),
                synchronized,
            )
        return done(h)


def done_pair(pair: tuple[Tensor, Tensor], synchronized: bool) -> tuple[Tensor, Tensor]:
    if synchronized:
        torch.cuda.synchronize()
    return pair


@pytest.mark.parametrize("rows", [1, 5, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_captured_chain_equals_kernels_launched_one_at_a_time(dtype, rows):
    """Catches a kernel that reads before it has waited, and any synchronization with the device."""
    world = World(dtype)
    ids = torch.arange(rows, device="cuda") * 4
    positions, slots = ids + 7, ids + 11
    slots[rows // 2 :: 7] = -1
    expected = world.step(ids, positions, slots, synchronized=True)
    written = world.cache.clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        torch.cuda.set_sync_debug_mode("error")
        try:
            eager = world.step(ids, positions, slots, synchronized=False)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        with torch.cuda.graph(graph, stream=stream):
            found = world.step(ids, positions, slots, synchronized=False)
    torch.cuda.synchronize()
    assert torch.equal(eager, expected)
    for _ in range(5):
        found.zero_()
        world.cache.zero_()
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(found, expected)
        assert torch.equal(world.cache, written)
    assert found.isfinite().all()
