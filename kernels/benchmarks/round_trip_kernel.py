"""Two devices that answer each other: the latency that no exchange between them can go below."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

MOST_POLLS = 1 << 22  # for one answer: about two seconds

# $0: the number that did not come, 0: all came. $1, $2: own word and the peer's, 0: idle lane.
# $3: whether this rank begins. $4: numbers already used. $5: round trips.
EXCHANGE = gl.constexpr(f"""{{
.reg .pred p, begins; .reg .b32 i, last, seen, polls;
mov.b32 $0, 0;
setp.eq.s64 p, $1, 0;
@p bra done;
setp.ne.s32 begins, $3, 0;
add.s32 i, $4, 1;
add.s32 last, $4, $5;
next:
@begins st.relaxed.sys.global.b32 [$2], i;
mov.b32 polls, 0;
again:
ld.relaxed.sys.global.b32 seen, [$1];
setp.eq.s32 p, seen, i;
@p bra came;
add.s32 polls, polls, 1;
setp.lt.s32 p, polls, {MOST_POLLS};
@p bra again;
mov.b32 $0, i;
bra done;
came:
@!begins st.relaxed.sys.global.b32 [$2], i;
add.s32 i, i, 1;
setp.le.s32 p, i, last;
@p bra next;
done:
}}""")


@gluon.jit(do_not_specialize=["begins", "used", "count"])
def round_trips(out_ptr, own, peer, begins, used, count):
    """`count` times: one rank stores a number to the other's word, which stores it back. Writes 0,
    or the first number that did not come. One warp.
    """
    lane = gl.arange(0, 32, gl.BlockedLayout([1], [32], [1], [0]))
    missing = gl.inline_asm_elementwise(
        EXCHANGE,
        "=&r,l,l,r,r,r",
        [gl.where(lane == 0, own, 0), peer, begins, used, count],
        dtype=gl.int32,
        is_pure=False,
        pack=1,
    )
    gl.store(out_ptr + lane, missing)
