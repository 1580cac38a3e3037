"""Input preparation, verification by choices and writing into the state: kernels against torch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hydraspec_kernels import step_inputs
from hydraspec_kernels.sampling import verification
from hydraspec_kernels.sampling.verification import kernel as verify_kernel
from hydraspec_kernels.sampling.verification import reference as verify_reference
from hydraspec_kernels.step_inputs import block_kernel
from hydraspec_kernels.step_inputs import kernel as rows_kernel
from hydraspec_kernels.step_inputs import reference as rows_reference
from hydraspec_kernels.step_inputs.records import GroupTables, RowLayout
from kernel_places import DEVICES
from torch import Tensor

BLOCK_SIZES = (16, 4)


def to(device: str, *values: Any) -> list[Any]:
    return [
        [x.to(device) for x in v] if isinstance(v, list | tuple) and torch.is_tensor(v[0])
        else v.to(device) if torch.is_tensor(v) else v
        for v in values
    ]  # fmt: skip


def moved(record: SimpleNamespace, device: str, copy: bool = False) -> Any:
    values = {name: x.to(device, copy=copy) for name, x in vars(record).items()}
    return SimpleNamespace(**values)


def fields(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in type(record).__dataclass_fields__}


def assert_same(got: Any, wanted: Any) -> None:
    """Two records hold the same numbers, wherever they are."""
    for name, value in fields(wanted).items():
        ours = getattr(got, name)
        if isinstance(value, list):
            assert len(ours) == len(value)
            pairs = list(zip(ours, value, strict=True))
        else:
            pairs = [(ours, value)]
        for a, b in pairs:
            assert a.dtype == b.dtype, name
            assert a.cpu().equal(b.cpu()), (name, a, b)


class Requests(NamedTuple):
    """A step over slots in a mixed order; the last slot is that of padding."""

    num_computed: Tensor  # [S]
    token_ids: Tensor  # [S, L]
    slots: Tensor  # [B]
    num_rows: Tensor  # [B]
    num_drafts: Tensor  # [B]
    row_request: Tensor  # [T]
    row_offset: Tensor  # [T]
    tables: list[Tensor]  # [B, P]

    def on(self, device: str) -> tuple[Any, RowLayout, Tensor, GroupTables]:
        """The arguments of `prepare_rows` on a device, but for K."""
        tokens = {"num_computed": self.num_computed, "token_ids": self.token_ids}
        names = ("num_rows", "num_drafts", "row_request", "row_offset")
        layout = RowLayout(**{name: getattr(self, name).to(device) for name in names})
        tokens = {name: x.to(device) for name, x in tokens.items()}
        return SimpleNamespace(**tokens), layout, self.slots.to(device), self.groups(device)

    def groups(self, device: str) -> GroupTables:
        return GroupTables([x.to(device) for x in self.tables], BLOCK_SIZES)


def requests(
    num_requests: int, num_drafts: int, *, prefill: bool = True, padding: int = 0, seed: int = 0
) -> Requests:
    """Requests with 0 to K drafts, some of which are missing (-1); one reads a long prompt."""
    draw = torch.Generator().manual_seed(seed)

    def ints(low: int, high: int, *shape: int) -> Tensor:
        return torch.randint(low, high, shape, generator=draw)

    b, s, columns = num_requests + padding, num_requests + 4, 300
    slots = torch.randperm(s - 1, generator=draw)[:num_requests]
    drafts = ints(0, num_drafts + 1, num_requests)
    rows = drafts + 1
    if prefill:
        rows[-1] += 140  # more than a block of lanes
    slots = torch.cat([slots, torch.full((padding,), s - 1)])
    drafts = torch.cat([drafts, torch.zeros(padding, dtype=torch.long)])
    laid = torch.cat([rows, torch.full((padding,), num_drafts + 1)])
    rows = torch.cat([rows, torch.zeros(padding, dtype=torch.long)])
    request = torch.arange(b).repeat_interleave(laid)
    starts = laid.cumsum(0) - laid
    computed = ints(1, 100, s)
    computed[-1] = 0
    tokens = ints(0, 1000, s, columns)
    tokens[ints(0, 2, s, columns) * ints(0, 2, s, columns) > 0] = -1
    return Requests(
        num_computed=computed,
        token_ids=tokens,
        slots=slots,
        num_rows=rows,
        num_drafts=drafts,
        row_request=request,
        row_offset=torch.arange(len(request)) - starts[request],
        tables=[ints(1, 50, b, 300 // size + 1) for size in BLOCK_SIZES],
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("count", "num_drafts", "padding"), [(1, 0, 0), (1, 3, 0), (5, 8, 0), (3, 3, 2), (131, 1, 5)]
)
def test_rows_of_the_target(count: int, num_drafts: int, padding: int, device: str) -> None:
    """More requests than lanes, more rows than lanes, missing drafts, padding at the end."""
    given = requests(count, num_drafts, padding=padding)
    wanted = rows_reference.prepare_rows_reference(*given.on("cpu"), num_drafts, padded=padding > 0)
    got = rows_kernel.prepare_rows_kernel(*given.on(device), num_drafts)
    assert_same(got, wanted)
    # Whatever the number of rows: another alignment is another compilation, in the middle of a run.
    assert all(rows.data_ptr() % 16 == 0 for rows in got.slot_mapping)
    if padding:
        assert wanted.seq_lens[-padding:].tolist() == [0] * padding
        assert (wanted.slot_mapping[0][-padding * (num_drafts + 1) :] == -1).all()


@pytest.mark.parametrize("device", DEVICES)
def test_rows_of_request_minus_one_are_padding(device: str) -> None:
    given = requests(3, 2)
    given.row_request[-5:] = -1
    wanted = rows_reference.prepare_rows_reference(*given.on("cpu"), 2, padded=True)
    got = rows_kernel.prepare_rows_kernel(*given.on(device), 2)
    assert_same(got, wanted)
    assert wanted.input_ids[-5:].tolist() == wanted.positions[-5:].tolist() == [0] * 5
    assert wanted.slot_mapping[1][-5:].tolist() == [-1] * 5


def test_padding_flag_only_saves_work() -> None:
    given = requests(4, 3)
    lean = rows_reference.prepare_rows_reference(*given.on("cpu"), 3, padded=False)
    assert_same(lean, rows_reference.prepare_rows_reference(*given.on("cpu"), 3, padded=True))


@pytest.mark.parametrize("device", DEVICES)
def test_slot_mapping(device: str) -> None:
    table, positions = torch.randint(1, 99, (5, 7)), torch.tensor([0, 5, 111, 16, 95])
    request = torch.tensor([0, -1, 2, 3, 4])
    wanted = rows_reference.slot_mapping_reference(table, request, positions, 16, padded=True)
    moved = to(device, positions, request + 1)  # length 0 is padding
    groups = GroupTables([table.to(device)], (16,))
    (got,) = rows_kernel.decode_rows_kernel(*moved, 0, groups).slot_mapping
    assert got.cpu().equal(wanted)
    assert wanted[1] == -1
    (outside,) = rows_kernel.decode_rows_kernel(*moved, 30, groups).slot_mapping
    assert outside.cpu().tolist()[2] == -1  # past the table: nothing is written


@pytest.mark.parametrize("device", DEVICES)
def test_tokens_after_rows(device: str) -> None:
    given = requests(5, 3)
    positions = given.num_computed[given.slots][given.row_request] + given.row_offset
    arguments = (given.token_ids, given.slots, given.row_request, positions)
    wanted = rows_reference.shifted_tokens_reference(*arguments)
    assert rows_kernel.shifted_tokens_kernel(*to(device, *arguments)).cpu().equal(wanted)
    given.row_request[3] = -1
    got = rows_kernel.shifted_tokens_kernel(*to(device, *arguments)).cpu()
    wanted[3] = 0
    assert got.equal(wanted)


def verdicts(given: Requests, num_drafts: int) -> tuple[Tensor, Tensor, Tensor]:
    """tokens, num_sampled and num_rejected, some requests not sampling."""
    b = given.slots.shape[0]
    rejected = torch.randint(0, 9, (b,)) % (given.num_drafts + 1)
    sampled = given.num_drafts - rejected + 1
    sampled[given.num_rows == 0] = 0
    sampled[::4] = 0
    rejected[sampled == 0] = 0
    tokens = torch.randint(0, 1000, (b, num_drafts + 1))
    return (
        torch.where(torch.arange(num_drafts + 1) < sampled[:, None], tokens, -1),
        sampled,
        rejected,
    )


def starts(given: Requests) -> Tensor:
    laid = given.row_request.bincount(minlength=given.slots.shape[0])
    return torch.nn.functional.pad(laid.cumsum(0), (1, 0))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize(("count", "num_drafts"), [(1, 0), (6, 3), (140, 2)])
def test_newest_rows_and_rows_after_them(
    count: int, num_drafts: int, padding: int, device: str
) -> None:
    given = requests(count, num_drafts, padding=padding)
    tokens, sampled, rejected = verdicts(given, num_drafts)
    verdict = SimpleNamespace(tokens=tokens, num_sampled=sampled, num_rejected=rejected)
    batch = SimpleNamespace(query_start_loc=starts(given), slots=given.slots)
    wanted = rows_reference.newest_rows_reference(verdict, batch, given.num_computed)
    got = rows_kernel.newest_rows_kernel(
        moved(verdict, device), moved(batch, device), given.num_computed.to(device)
    )
    assert_same(got, wanted)
    after = rows_kernel.decode_rows_kernel(got.positions, got.seq_lens, 2, given.groups(device))
    expected = rows_reference.decode_rows_reference(
        wanted.positions, wanted.seq_lens, 2, given.groups("cpu")
    )
    if padding:
        empty = wanted.seq_lens == 0
        assert empty.sum() == padding
        expected.positions[empty] = expected.seq_lens[empty] = 0
        for rows in expected.slot_mapping:
            rows[empty] = -1
    assert_same(after, expected)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_padding", [0, 2])
@pytest.mark.parametrize(("count", "num_rows"), [(1, 1), (5, 8), (33, 16), (140, 3)])
def test_rows_of_blocks(count: int, num_rows: int, num_padding: int, device: str) -> None:
    lengths = torch.randint(1, 60, (count + num_padding,))
    lengths[count:] = 0
    tables = [torch.randint(1, 99, (len(lengths), 80 // size)) for size in BLOCK_SIZES]
    newest = torch.randint(0, 1000, lengths.shape)
    rest = {"num_rows": num_rows, "mask_token_id": 777}
    given = (newest, lengths, GroupTables(tables, BLOCK_SIZES))
    wanted = rows_reference.block_rows_reference(*given, **rest, padded=bool(num_padding))
    moved = (*to(device, newest, lengths), GroupTables(*to(device, tables), BLOCK_SIZES))
    got = block_kernel.block_rows_kernel(*moved, **rest)
    assert_same(got, wanted)
    assert wanted.query_start_loc.tolist() == [n * num_rows for n in range(len(lengths) + 1)]
    assert wanted.seq_lens[count:].tolist() == [0] * num_padding


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("count", "num_drafts", "masks"), [(1, 3, 2), (5, 3, 0), (133, 2, 1)])
def test_rows_of_a_parallel_drafter(count: int, num_drafts: int, masks: int, device: str) -> None:
    given = requests(count, num_drafts)
    _, _, rejected = verdicts(given, num_drafts)
    seq_lens = given.num_computed[given.slots] + given.num_rows
    batch = SimpleNamespace(query_start_loc=starts(given), seq_lens=seq_lens, slots=given.slots)
    rest = {"num_masks": masks, "mask_token_id": 77, "num_rows": given.row_request.shape[0]}
    wanted = rows_reference.parallel_rows_reference(
        given.token_ids, batch, rejected, given.groups("cpu"), **rest
    )
    tokens, rejected = to(device, given.token_ids, rejected)
    got = rows_kernel.parallel_rows_kernel(
        tokens, moved(batch, device), rejected, given.groups(device), **rest
    )
    assert_same(got, wanted)


@pytest.mark.parametrize("device", DEVICES)
def test_padding_of_a_parallel_drafter(device: str) -> None:
    """Requests without rows and rows after the last request: no id, no cache row, length 0."""
    given = requests(3, 2, prefill=False, padding=2)
    _, _, rejected = verdicts(given, 2)
    seq_lens = (given.num_computed[given.slots] + given.num_rows).where(given.num_rows > 0, 0)
    count = given.row_request.shape[0]
    batch = SimpleNamespace(query_start_loc=starts(given), seq_lens=seq_lens, slots=given.slots)
    tokens, rejected = to(device, given.token_ids, rejected)
    got = rows_kernel.parallel_rows_kernel(
        tokens,
        moved(batch, device),
        rejected,
        given.groups(device),
        num_masks=3,
        mask_token_id=77,
        num_rows=count + 4,
    )
    after = 2 * (3 + 3) + 4
    assert got.seq_lens[-2:].tolist() == [0, 0]
    for values in (got.input_ids, got.positions, got.is_valid, got.source):
        assert not values[-after:].any()
    for rows in got.slot_mapping:
        assert (rows[-after:] == -1).all()


def verify_inputs(count: int, num_drafts: int, seed: int = 0) -> tuple[Tensor, SimpleNamespace]:
    """Choices and a batch: few tokens, so that many match."""
    draw = torch.Generator().manual_seed(seed)
    drafts_of = torch.randint(0, num_drafts + 1, (count,), generator=draw)
    samples = torch.rand(count, generator=draw) < 0.8
    samples[0] = True
    column = torch.arange(num_drafts + 1)
    rows = drafts_of + 1
    first = rows.cumsum(0) - rows
    verify_rows = first[:, None] + torch.minimum(column, drafts_of[:, None])
    drafts = torch.randint(-1, 3, (count, num_drafts), generator=draw).clamp(min=-1)
    drafts = drafts.where(column[:-1] < drafts_of[:, None], -1)
    choices = torch.randint(0, 2, (int(rows.sum()),), generator=draw)
    broken = torch.rand(choices.shape, generator=draw) < 0.1
    choices = torch.where(broken, ~choices, choices)
    return choices, SimpleNamespace(
        verify_rows=verify_rows * samples[:, None],
        draft_tokens=drafts,
        num_drafts=drafts_of,
        samples=samples,
    )


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_drafts", range(9))
def test_prefix_verification(num_drafts: int, device: str) -> None:
    """Some choices are marked: they accept no draft, not even -1, and none emits a mark."""
    choices, batch = verify_inputs(70, num_drafts, seed=num_drafts)
    wanted = verify_reference.verify_prefix_reference(choices, batch)
    got = verify_kernel.verify_prefix_kernel(choices.to(device), moved(batch, device))
    assert_same(got, wanted)
    assert num_drafts < 2 or wanted.num_sampled.unique().numel() > 2
    assert 0 < wanted.not_finite.sum() < 70
    emitted = torch.arange(num_drafts + 1) < wanted.num_sampled[:, None]
    assert (wanted.tokens[emitted] >= 0).all()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("length", [1.0, 2.3, 4.0])
@pytest.mark.parametrize("num_drafts", [0, 1, 3, 7])
def test_synthetic_verification(num_drafts: int, length: float, device: str) -> None:
    """The draws are those of the streams: the same drafts are accepted everywhere."""
    choices, batch = verify_inputs(70, num_drafts)
    batch.seq_lens, batch.slots = torch.randint(20, 900, (70,)), torch.randperm(90)[:70]
    seed = torch.randint(-99, 99, (90,))
    wanted = verify_reference.verify_synthetic_reference(choices, batch, seed, length)
    got = verify_kernel.verify_synthetic_kernel(
        choices.to(device), moved(batch, device), seed.to(device), length
    )
    assert_same(got, wanted)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("num_drafts", [0, 1, 3, 7])
def test_synthetic_verification_of_recorded_counts(num_drafts: int, device: str) -> None:
    """A row too far, another slot's or a draw would accept another number."""
    choices, batch = verify_inputs(70, num_drafts)
    batch.seq_lens, batch.slots = torch.randint(20, 900, (70,)), torch.randperm(90)[:70]
    seed, counts = torch.randint(-99, 99, (90,)), torch.randint(0, 9, (90, 901))
    accepts = counts.to(torch.int8)
    wanted = verify_reference.verify_synthetic_reference(choices, batch, seed, 1.0, accepts)
    got = verify_kernel.verify_synthetic_kernel(
        choices.to(device), moved(batch, device), seed.to(device), 1.0, accepts.to(device)
    )
    assert_same(got, wanted)
    first = batch.seq_lens - batch.num_drafts
    whole = batch.samples & (batch.draft_tokens >= 0).all(1) & (wanted.not_finite == 0)
    is_sound = (choices >= 0).take(batch.verify_rows).all(1)
    found = wanted.num_sampled[whole & is_sound] - 1
    recorded = counts[batch.slots, first].clamp(max=num_drafts)
    assert found.equal(recorded[whole & is_sound])
    assert num_drafts not in (1, 3) or len(found) > 2


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("padding", [0, 3])
@pytest.mark.parametrize("num_drafts", [0, 3])
def test_commit_and_drafts(num_drafts: int, padding: int, device: str) -> None:
    """Only slots in use change; the last column takes masked writes."""
    given = requests(40, num_drafts, padding=padding)
    tokens, sampled, rejected = verdicts(given, num_drafts)
    samples = sampled > 0
    seq_lens = (given.num_computed[given.slots] + given.num_rows).where(given.num_rows > 0, 0)
    step = SimpleNamespace(
        slots=given.slots, seq_lens=seq_lens, num_drafts=given.num_drafts, samples=samples
    )
    verdict = SimpleNamespace(tokens=tokens, num_rejected=rejected)
    theirs = SimpleNamespace(
        token_ids=given.token_ids.clone(), num_computed=given.num_computed.clone()
    )
    ours = moved(theirs, device, copy=True)
    verify_kernel.commit_tokens_kernel(ours, moved(step, device), moved(verdict, device))
    verification.commit_tokens(theirs, step, verdict)
    drafts = torch.randint(0, 1000, (len(samples), num_drafts + 1))
    verify_kernel.store_drafts_kernel(ours, moved(step, device), drafts.to(device))
    verification.store_drafts(theirs, step, drafts)
    assert ours.token_ids[:, :-1].cpu().equal(theirs.token_ids[:, :-1])
    assert ours.num_computed.cpu().equal(theirs.num_computed)
    assert ours.token_ids[-1].cpu().equal(given.token_ids[-1])


def test_public_functions_take_the_reference_on_the_cpu() -> None:
    given = requests(2, 1)
    got = step_inputs.prepare_rows(*given.on("cpu"), 1)
    assert got.draft_tokens.shape == (2, 1)
