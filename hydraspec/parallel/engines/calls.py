"""The calls of an engine that ranks make together, as data: announced by rank 0, made by the
others."""

from __future__ import annotations

from contextlib import closing

from hydraspec.config.schema import RunConfig
from hydraspec.engine.native import NativeEngine
from hydraspec.parallel.control import Control, Plain
from hydraspec.parallel.engines.outcome import Peers, Together
from hydraspec.parallel.engines.replicas import Share, replica_events, send_events
from hydraspec.parallel.engines.wire import to_prompt, to_requests
from hydraspec.parallel.ranks import current

CALL = "call"  # the topic of announcements
CLOSE = "close"


def announce(control: Control, number: int, name: str, **arguments: Plain) -> None:
    """Have every other rank make a call of its engine `number`, counted in the order in which
    engines were built."""
    control.tell(control.all_ranks, CALL, [number, name, arguments])


def follow(config: RunConfig) -> None:
    """Run a rank other than 0: build the same engine, and make the calls that rank 0 announces,
    until it closes the engine. The ranks are those of `parallel.ranks.current()`.

    Raises:
        Exception: the first error of the run, if it ends the whole run; rank 0 raises it too.
    """
    together, engines = Together(current()), [Peers()]
    control = together.control
    with together.call(engines[0]):
        engines[0].engine = NativeEngine(config)
    while True:
        number, name, arguments = control.hear(0, CALL)
        if name == CLOSE:
            return
        peers = engines[number]
        assert peers.engine is not None
        if name == "baseline":
            engines.append(Peers())
            with together.call(engines[-1]):
                engines[-1].engine = peers.engine.baseline()
        else:
            with together.call(peers):
                _make(name, peers.engine, control, arguments)


def _make(name: str, engine: NativeEngine, control: Control, arguments: Plain) -> None:
    if name == "next_token_logits":
        if control.replica[0] == 0:
            prompt = to_prompt(arguments["prompt"])
            engine.next_token_logits(prompt.token_ids, prompt.spans)
        return
    requests = to_requests(arguments["requests"])
    if name == "prepare":
        engine.prepare(requests)
    elif name == "run":
        share = Share(**arguments["share"])
        with closing(replica_events(engine, control, requests, share)) as events:
            send_events(events, control)
    elif control.replica[0] == 0:  # one replica is profiled
        {"profile_step": engine.profile_step, "profile_phases": engine.profile_phases}[name](
            requests
        )
