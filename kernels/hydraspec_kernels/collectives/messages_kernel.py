"""Messages between ranks, 16 bytes of them at a time, in memory that peers store to.

A box holds all ones where no message is. The sender stores words that are never all ones; the
receiver loads until no word is, and sets them to all ones again. A word announces itself, so no
order is needed: a message takes no fence, no flag, and one trip over the link.

The memory operations, and why they suffice:
- `st.relaxed.sys` and `ld.relaxed.sys`: each 32-bit word is one access that is neither torn nor
  served by an L1, which is not coherent with peers. The order among words does not matter.
- A receiver resets words it has loaded itself: one thread, one address, in program order.
- A box is used by every second message. A peer sends message k + 2 after its launch of message
  k + 1 has ended, hence after it received this rank's message k + 1, which this rank sent after
  its launch of message k had ended, resets included (`wait_for_inputs`). So a message finds its box
  empty, and no second exchange is needed.
- How many messages a box has received is counted on the device by the program that receives them:
  graphs may be replayed in any order that is the same on every rank.

A wait is bounded: now and then it reads the host's word for faults and %globaltimer. After the
limit it writes what is missing to that word and goes on, as all later waits then do.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

POLLS = gl.constexpr(1024)  # between looks at the clock; a power of two


@gluon.constexpr_function
def _largest(words: list[str]) -> str:
    return "".join(f"max.u32 n, n, {word};\n" for word in words)


@gluon.constexpr_function
def send_ptx() -> str:
    """PTX that sends four words. $0-$3 become zeros, $4-$7 are the words, $8 is the address to
    store them to, or 0 for none. Words of all ones, which are NaNs, are sent as other NaNs.
    """
    words = "".join(
        f"setp.eq.s32 p, ${4 + i}, -1; selp.b32 w{i}, 0x7fffffff, ${4 + i}, p; " for i in range(4)
    )
    zeros = "".join(f"mov.b32 ${i}, 0; " for i in range(4))
    return (
        "{ .reg .pred p; .reg .b32 w<4>; "
        f"{words}setp.ne.s64 p, $8, 0; "
        f"@p st.relaxed.sys.global.v4.b32 [$8], {{w0, w1, w2, w3}}; {zeros}}}"
    )


@gluon.constexpr_function
def receive_ptx(size: int, pack: int, stride: int) -> str:
    """PTX that receives words. $0 and later become four words of each rank; after them come the
    address of rank 0's words, or 0 for none, the address of `control`, and the code of a fault.
    """
    at, control, code = (f"${4 * size + i * pack}" for i in range(3))
    names = [[f"w{4 * rank + i}" for i in range(4)] for rank in range(size)]
    every = [name for words in names for name in words]
    load, reset, blame = "", "", ""
    for rank, words in enumerate(names):
        listed = ", ".join(words)
        load += f"ld.relaxed.sys.global.v4.b32 {{{listed}}}, [{at}+{rank * stride}];\n"
        reset += f"st.relaxed.sys.global.v4.b32 [{at}+{rank * stride}], {{n, n, n, n}};\n"
    for rank, words in reversed(list(enumerate(names))):
        blame += f"mov.b32 n, 0;\n{_largest(words)}setp.eq.u32 p, n, -1;\n"
        blame += f"@p mov.b64 end, {rank << 8};\n"
    return f"""{{
.reg .pred p; .reg .b32 w<{4 * size}>, n, polls; .reg .b64 now, end, fault;
{"".join(f"mov.b32 {name}, 0; " for name in every)}
setp.eq.s64 p, {at}, 0;
@p bra done;
mov.b32 polls, 0; mov.b64 end, 0;
again:
{load}mov.b32 n, 0;
{_largest(every)}setp.ne.u32 p, n, -1;
@p bra arrived;
add.u32 polls, polls, 1;
and.b32 n, polls, {POLLS.value - 1};
setp.ne.u32 p, n, 0;
@p bra again;
ld.global.b64 fault, [{control}];
ld.relaxed.sys.global.b64 now, [fault];
setp.ne.s64 p, now, 0;
@p bra done;
mov.u64 now, %globaltimer;
setp.ne.s64 p, end, 0;
@p bra compare;
ld.global.b64 end, [{control}+8];
add.s64 end, end, now;
bra again;
compare:
setp.lt.u64 p, now, end;
@p bra again;
{blame}or.b64 end, end, {code};
st.relaxed.sys.global.b64 [fault], end;
bra done;
arrived:
mov.b32 n, -1;
{reset}done:
{"".join(f"mov.b32 ${i}, {name}; " for i, name in enumerate(every))}
}}"""


@gluon.constexpr_function
def _operands(outputs, words, addresses):
    return ",".join(["=r"] * outputs + ["r"] * words + ["l"] * addresses)


@gluon.constexpr_function
def _repeated(dtype, count):
    return (dtype,) * count


@gluon.jit
def send(peers, words, inside, at, SIZE: gl.constexpr, PACK: gl.constexpr):
    """Stores a tile of words at byte `at` of every rank's boxes. PACK words are 16 bytes; of their
    `inside`, only the first is read.
    """
    for i in gl.static_range(SIZE):
        gl.inline_asm_elementwise(
            send_ptx(),
            _operands(4, 4, PACK),
            [words, gl.where(inside, peers[i] + at, 0)],
            dtype=words.dtype,
            is_pure=False,
            pack=PACK,
        )


@gluon.jit
def receive(
    own, control, code, inside, at, WORD: gl.constexpr, SIZE: gl.constexpr, PACK: gl.constexpr,
    STRIDE: gl.constexpr,
):  # fmt: skip
    """Every rank's words, as a tuple, from byte `at` of this rank's boxes `own`, STRIDE apart."""
    return gl.inline_asm_elementwise(
        receive_ptx(SIZE, PACK, STRIDE),
        _operands(4 * SIZE, 0, 3 * PACK),
        [gl.where(inside, own + at, 0), control.to(gl.int64), code],
        dtype=_repeated(WORD, SIZE),
        is_pure=False,
        pack=PACK,
    )
