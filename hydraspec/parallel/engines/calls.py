"""The calls of an engine that ranks make together, as data: announced by rank 0, made by the
others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import closing

from hydraspec.config.schema import RunConfig
from hydraspec.engine.native import NativeEngine
from hydraspec.parallel.control import Control, Plain
from hydraspec.parallel.engines.outcome import Peers, Together
from hydraspec.parallel.engines.replicas import Share, replica_events, send_events
from hydraspec.parallel.engines.wire import from_image, to_image, to_requests
from hydraspec.parallel.ranks import current
from hydraspec.types import Image, Request, by_digest

CALL = "call"  # the topic of announcements
CLOSE = "close"
IMAGE = "image"  # announces an image that later calls have, to every rank once


def announce(control: Control, number: int, name: str, **arguments: Plain) -> None:
    """Have every other rank make a call of its engine `number`, counted in the order in which
    engines were built."""
    control.tell(control.all_ranks, CALL, [number, name, arguments])


class Images:
    """Images that all ranks have, by the digests of their spans."""

    def __init__(self) -> None:
        self._sent: set[str] = set()

    def send(self, control: Control, requests: Iterable[Request]) -> None:
        """Announce those images of requests that other ranks do not have yet."""
        for request in requests:
            for digest, image in by_digest(request.spans, request.images).items():
                if digest not in self._sent:
                    announce(control, 0, IMAGE, digest=digest, image=from_image(image))
                    self._sent.add(digest)


def follow(config: RunConfig) -> None:
    """Run a rank other than 0: build the same engine, and make the calls that rank 0 announces,
    until it closes the engine. The ranks are those of `parallel.ranks.current()`.

    Raises:
        Exception: the first error of the run, if it ends the whole run; rank 0 raises it too.
    """
    together, engines = Together(current()), [Peers()]
    control, images = together.control, dict[str, Image]()
    with together.call(engines[0]):
        engines[0].engine = NativeEngine(config)
    while True:
        number, name, arguments = control.hear(0, CALL)
        if name == CLOSE:
            return
        if name == IMAGE:
            images[arguments["digest"]] = to_image(arguments["image"])
            continue
        peers = engines[number]
        assert peers.engine is not None
        if name == "baseline":
            engines.append(Peers())
            with together.call(engines[-1]):
                engines[-1].engine = peers.engine.baseline()
        else:
            with together.call(peers):
                _make(name, peers.engine, control, arguments, images)


def _make(
    name: str,
    engine: NativeEngine,
    control: Control,
    arguments: Plain,
    images: Mapping[str, Image],
) -> None:
    requests = to_requests(arguments["requests"], images)
    if name == "next_token_logits":
        if control.replica[0] == 0:
            (request,) = requests
            engine.next_token_logits(request.tokens.token_ids, request.spans, request.images)
        return
    if name == "prepare":
        engine.prepare(requests, concurrency=arguments["concurrency"])
    elif name == "run":
        share = Share(**arguments["share"])
        with closing(replica_events(engine, control, requests, share)) as events:
            send_events(events, control)
    elif control.replica[0] == 0:  # one replica is profiled
        {"profile_step": engine.profile_step, "profile_phases": engine.profile_phases}[name](
            requests
        )
