"""Speed of suffix decoding over `none` on text without repetition, in one process.

    python tests/bench/suffix_on_prose.py [target] [rounds] [method]   # tiny_gemma4, 6 and suffix

Prompts are English sentences, and outputs 64 tokens sampled at temperature 4. Both engines run the
same requests in turn, in alternating order, at 1, 4 and 16 requests at once (4, 8 and 16 prompts).
Prints a line for each: the median ratio of tokens per second of the process's CPU time, and its
quartiles, the same of the wall's, and the counted work of a round: steps, steps with drafts, rows
beyond those of `none`, and milliseconds of the host's drafting. Processes differ by more than
rounds do: take the median of several.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass

import numpy as np
import torch
from rich.console import Console

import hydraspec
from hydraspec.engine.base import Engine
from hydraspec.types import Request, SamplingParams, StepRecord

say = Console(soft_wrap=True, markup=False, highlight=False).print
LOADS = ((1, 4), (4, 8), (16, 16))  # requests at once, and prompts
NUM_TOKENS = 64
SENTENCES = """\
The harbour was quiet after the storm, and gulls walked between the boats as if they owned them.
A good map leaves out almost everything, which is why it fits into a pocket.
My grandmother kept buttons in a tin box and could name the coat that each had come from.
Rivers do not hurry, yet by spring this one had moved the whole sandbank a mile south.
Nobody in the village remembered who had planted the walnut tree beside the chapel.
The engineer listened to the pump for a while and then tightened a single screw.
Bread needs little more than flour, water, salt and somebody with patience.
At noon the museum closes, since the guard is also the cook of the small cafe next door.
Her letters arrived in pairs, one cheerful and one honest, always on the same day.
Snow fell on the observatory all week, so the astronomers played chess by candlelight.
An old violin sounds warm because thin wood forgets how to resist.
The last train left early, and the platform filled with people who were not surprised.
Children drew the lighthouse taller every year although it never grew.
He repaired clocks for a living but wore no watch himself.
Under the bridge a fox had made its home out of newspapers and one red glove.
Wind turbines turn slowly in the evening, like swimmers who have plenty of time.""".splitlines()


@dataclass
class Round:
    """What a run of all requests took."""

    cpu_s: float
    wall_s: float
    records: list[StepRecord]

    @property
    def num_tokens(self) -> int:
        return sum(len(p.output_token_ids) for record in self.records for p in record.requests)


def run(engine: Engine, requests: list[Request], at_once: int) -> Round:
    cpu, wall = time.process_time(), time.perf_counter()
    records = [e for e in engine.run(requests, concurrency=at_once) if isinstance(e, StepRecord)]
    return Round(time.process_time() - cpu, time.perf_counter() - wall, records)


def requests_of(engine: Engine, count: int) -> list[Request]:
    found = []
    for index, prompt in enumerate(SENTENCES[:count]):
        sampling = SamplingParams(
            temperature=4.0, max_tokens=NUM_TOKENS, ignore_eos=True, seed=index
        )
        found.append(Request(index=index, id=str(index), sampling=sampling, prompt=prompt))
    engine.tokenize(found)
    return found


def counted(records: list[StepRecord]) -> str:
    """Work of a round's decode steps that `none` does not have."""
    decodes = [[p for p in r.requests if not p.is_prefill] for r in records]
    extra = [sum(p.num_rows - 1 for p in parts) for parts in decodes]
    accepted = sum(p.num_accepted for parts in decodes for p in parts)
    proposing = sum(record.phase_ms["propose"] or 0.0 for record in records)
    return (
        f"{sum(n > 0 for n in extra)} of {sum(map(bool, decodes))} decode steps have drafts, "
        f"{sum(extra)} more rows, {accepted} accepted, drafting {proposing:.2f} ms"
    )


def quartiles(ratios: list[float]) -> str:
    low, middle, high = np.quantile(ratios, (0.25, 0.5, 0.75))
    return f"{middle:.3f} ({low:.3f} to {high:.3f})"


def main(target: str = "tiny_gemma4", rounds: str = "6", method: str = "suffix") -> None:
    torch.set_num_threads(1)
    typed = [f"target={target}", f"method={method}", "tracker=none", "engine.num_threads=1"]
    drafting = hydraspec.build_engine(typed)
    engines = {"none": drafting.baseline(), method: drafting}
    for at_once, count in LOADS:
        requests = requests_of(drafting, count)
        for engine in engines.values():
            run(engine, requests, at_once)
        cpu, wall = list[float](), list[float]()
        for number in range(int(rounds)):
            names = list(engines)[:: 1 if number % 2 else -1]
            found = {name: run(engines[name], requests, at_once) for name in names}
            mine, plain = found[method], found["none"]
            more = mine.num_tokens / plain.num_tokens
            cpu.append(more * plain.cpu_s / mine.cpu_s)
            wall.append(more * plain.wall_s / mine.wall_s)
        say(
            f"{target} {method} {at_once}: CPU {quartiles(cpu)}, wall {quartiles(wall)}; "
            f"{counted(mine.records)} of {1e3 * mine.wall_s:.0f}"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
