"""Speed of suffix decoding over `none` on text without repetition, in one process.

    python tests/bench/suffix_on_prose.py [target] [rounds] [key=value ...]      # tiny_gemma4 and 6
    python tests/bench/suffix_on_prose.py tiny_gemma4 6 --shape gemma4_31b    # on a GPU

Prompts are English sentences, and outputs 64 tokens sampled at temperature 4. Both engines run the
same requests in turn, in alternating order, at 1, 4 and 16 requests at once (4, 8 and 16 prompts),
after runs until none compiles or captures anything. Prints a line for each: the median ratio of
tokens per second of the process's CPU time, and its quartiles, the same of the wall's (on CUDA that
first, as the host works beside the device), and the counted work of a round: steps, steps with
drafts, rows beyond those of `none`, and milliseconds of the host's drafting, where measured.
Processes differ by more than rounds do: take the median of several.

With --shape the target has random weights in that released shape, but the vocabulary of `target`
and its tokenizer, so that prompts are the same and short matches as frequent. Few drafts should be
accepted; many mean that its outputs repeat themselves. Arguments key=value are overrides.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

import hydraspec
from hydraspec.engine.base import Engine
from hydraspec.shipped import SHAPES, ZOO
from hydraspec.types import Request, SamplingParams, StepRecord

say = Console(soft_wrap=True, markup=False, highlight=False).print
LOADS = ((1, 4), (4, 8), (16, 16))  # requests at once, and prompts
NUM_TOKENS = 64
MOST_WARM_UPS = 5
SIZES = ("vocab_size", "vocab_size_per_layer_input")
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


def write_shape(folder: Path, shape: str, target: str) -> None:
    """Write config.json of a released shape with the vocabulary of a tiny target, and the files of
    that target's tokenizer."""
    tiny = ZOO / target
    shutil.copytree(tiny, folder, ignore=shutil.ignore_patterns("*.safetensors", "config.json"))
    config = json.loads((SHAPES / shape / "config.json").read_bytes())
    known = json.loads((tiny / "config.json").read_bytes())
    for part in (config, config.get("text_config", {})):
        for key in list(part):
            if key in SIZES:
                part[key] = known["vocab_size"]
            elif key.endswith("_token_id"):
                part[key] = known.get(key)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")


def warm_up(engine: Engine, requests: list[Request], at_once: int) -> None:
    """Run until nothing is compiled and no graph captured."""
    for _ in range(MOST_WARM_UPS):
        before = engine.num_built()
        run(engine, requests, at_once)
        if engine.num_built() == before:
            return
    say(f"{MOST_WARM_UPS} runs at {at_once} requests each compiled or captured something")


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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("target", nargs="?", default="tiny_gemma4")
    parser.add_argument("rounds", nargs="?", type=int, default=6)
    parser.add_argument("--method", default="suffix")
    parser.add_argument("--shape", help="a folder's name in hydraspec/models/shapes")
    args, overrides = parser.parse_known_args()
    torch.set_num_threads(1)
    typed = [f"method={args.method}", "tracker=none", "engine.num_threads=1"]
    with tempfile.TemporaryDirectory() as folder:
        if args.shape is None:
            typed.append(f"target={args.target}")
        else:
            write_shape(Path(folder) / args.shape, args.shape, args.target)
            typed += ["target=custom", f"target.checkpoint={folder}/{args.shape}"]
            typed += ["target.weights=random", "target.max_model_len=512"]
        engine = hydraspec.build_engine([*typed, *overrides])
        measure(engine, args.shape or args.target, args.method, args.rounds)


def measure(drafting: Engine, target: str, method: str, num_rounds: int) -> None:
    engines = {"none": drafting.baseline(), method: drafting}
    on_device = not drafting.info.device.startswith("cpu")
    for at_once, count in LOADS:
        requests = requests_of(drafting, count)
        for engine in engines.values():
            warm_up(engine, requests, at_once)
        cpu, wall = list[float](), list[float]()
        for number in range(num_rounds):
            names = list(engines)[:: 1 if number % 2 else -1]
            found = {name: run(engines[name], requests, at_once) for name in names}
            mine, plain = found[method], found["none"]
            more = mine.num_tokens / plain.num_tokens
            cpu.append(more * plain.cpu_s / mine.cpu_s)
            wall.append(more * plain.wall_s / mine.wall_s)
        ratios = [f"CPU {quartiles(cpu)}", f"wall {quartiles(wall)}"]
        say(
            f"{target} {method} {at_once}: {', '.join(ratios[:: -1 if on_device else 1])}; "
            f"{counted(mine.records)} of {1e3 * mine.wall_s:.0f}"
        )


if __name__ == "__main__":
    main()
