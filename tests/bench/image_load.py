"""A mixed load of requests of which every second has a picture, through the native engine or vLLM,
on random weights in released shapes; and the share of its time that the image encoder takes.

    python tests/bench/image_load.py e4b 31b                  # natively, none and gemma4_mtp
    python tests/bench/image_load.py e4b --engine vllm --methods none
    python tests/bench/image_load.py tiny --requests 8        # a trained model, on a CPU

Text lengths and output lengths are lognormal, pictures those of workload=images, each another one,
of 250 to 280 tokens. Accepted drafts are synthetic, 2.5 tokens per step. Prompts are token ids; the
native engine gets patches, which are prepared before a pass, vLLM pixels, which it prepares in its
first pass and keeps. Both encode every picture once in every pass. Printed is a line of JSON for
each pass; the first ones compile and capture. Arguments of the form key=value are overrides. With
VLLM_ENABLE_V1_MULTIPROCESSING=1 in its environment vLLM's engine is a process of its own.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from image_shapes import write_shape

from hydraspec import factory
from hydraspec.bench.passes import Passes, make_requests
from hydraspec.cli.compose import plan
from hydraspec.config.schema import RunConfig
from hydraspec.engine.native import NativeEngine
from hydraspec.engine.pictures import put_images, read_pictures
from hydraspec.lab.resolution import resolve
from hydraspec.models.checkpoint.config_reader import text_part
from hydraspec.models.checkpoint.reader import open_checkpoint
from hydraspec.models.pictures.format import read_picture_format
from hydraspec.pictures import Picture, png
from hydraspec.types import Request
from hydraspec.workloads.drawn import question

TINY = "tiny"
METHODS = ("none", "gemma4_mtp")
PROMPT, OUTPUT = (200.0, 0.8, 16, 1024), (100.0, 0.5, 16, 256)  # median, sigma, least, most
FIRST_ID = 8  # below are special tokens


def main() -> None:
    """Print the passes of every shape and method."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("shapes", nargs="+", metavar="SHAPE", help="e2b, e4b, 26b_a4b, 31b or tiny")
    parser.add_argument("--engine", choices=("native", "vllm"), default="native")
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--passes", type=int, default=3)
    args, overrides = parser.parse_known_args()
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr)
    with tempfile.TemporaryDirectory() as folder:
        for shape in args.shapes:
            if shape != TINY:
                write_shape(Path(folder) / shape, shape)
            for method in args.methods:
                config = _config(Path(folder) / shape, shape, method, args.engine, overrides)
                requests = requests_of(config, args.requests)
                _measure(config, requests, args.passes)


def _config(
    folder: Path, shape: str, method: str, engine: str, overrides: Sequence[str]
) -> RunConfig:
    given = [f"engine={engine}", f"method={method}", "tracker=none", "baseline=false"]
    given += ["engine.prefix_caching=false", "engine.max_num_seqs=32"]
    given += ["engine.max_num_batched_tokens=8192"]
    if engine == "vllm":
        given += ["engine.vllm.images=true", "engine.vllm.record_steps=false"]
    if shape == TINY:
        given += ["target=tiny_gemma4_images"]
    else:
        given += [f"target=gemma4_{shape}", f"target.checkpoint={folder}"]
        given += ["target.weights=random", "target.max_model_len=4096"]
    if method != "none":
        given += ["method.num_speculative_tokens=3", "method.verification=synthetic"]
        given += ["method.synthetic_acceptance_length=2.5"]
        if shape != TINY:
            given += [f"method.checkpoint=shape:gemma4_{shape}-assistant", "method.weights=random"]
    config = plan([*given, *overrides]).jobs[0].config
    resolve(config)
    return config


def requests_of(config: RunConfig, count: int) -> list[Request]:
    """The requests of the load, the same for every engine; every second begins with a picture, or
    has it between two halves of its text."""
    opened = open_checkpoint(config.target.checkpoint)
    form = read_picture_format(opened, config.target.max_soft_tokens)
    assert form is not None
    rng = np.random.default_rng(config.seed)
    texts, outputs = (_lengths(rng, count, *shape) for shape in (PROMPT, OUTPUT))
    last = min(form.begin_id, form.image_id, form.end_id, text_part(opened.config)["vocab_size"])
    prompts: list[list[int]] = [rng.integers(FIRST_ID, last, length).tolist() for length in texts]
    requests = make_requests(config, prompts, outputs)
    for i, request in enumerate(requests[1::2]):
        pixels = question(config.seed, i).pictures[0]
        request.pictures = (Picture(name=str(i), content=png(pixels)),)
    read = read_pictures(requests, form)
    for i, (request, ids) in enumerate(zip(requests, prompts, strict=True)):
        if request.pictures:
            at = len(ids) // 2 if i % 4 == 3 else 0
            put_images(request, [*ids[:at], form.image_id, *ids[at:]], read[i], form)
        assert request.error is None, request.error
    return requests


def _lengths(
    rng: np.random.Generator, count: int, median: float, sigma: float, least: int, most: int
) -> list[int]:
    found = rng.lognormal(np.log(median), sigma, count)
    return [int(length) for length in np.clip(found, least, most)]


def _measure(config: RunConfig, requests: Sequence[Request], count: int) -> None:
    started = time.perf_counter()
    engine = factory.build_engine(config)
    load_s = time.perf_counter() - started
    try:
        encoding = _Encoding(engine) if isinstance(engine, NativeEngine) else None
        for number in range(1, count + 1):
            passes = Passes(engine, requests)
            passes.run()
            tower_s = encoding.seconds() if encoding else None
            seconds = passes.seconds[0]
            row: dict[str, Any] = {
                **{"engine": engine.info.engine, "target": config.target.name},
                **{"method": config.method.name, "pass": number, **passes.figures()},
                "num_images": sum(len(request.images) for request in requests),
                "image_tokens": sum(s.length for request in requests for s in request.spans),
                "prompt_tokens": sum(len(request.tokens.token_ids) for request in requests),
                "tower_seconds": tower_s,
                "tower_share": None if tower_s is None else tower_s / seconds,
                **{"built": passes.num_built, "load_seconds": load_s},
            }
            sys.stdout.write(json.dumps(row) + "\n")
            sys.stdout.flush()
    finally:
        engine.close()


class _Encoding:
    """The time that the image encoder of an engine takes, by the device's clock on CUDA."""

    def __init__(self, engine: NativeEngine) -> None:
        encoder: Any = engine.parts.target.encoder  # type: ignore[attr-defined]
        self._encode: Callable[[Any], Any] = encoder.encode
        self._is_cuda = encoder.device.type == "cuda"
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._host_s = 0.0
        encoder.encode = self._timed

    def seconds(self) -> float:
        """Time since the last call."""
        found, self._host_s = self._host_s, 0.0
        if self._is_cuda:
            torch.cuda.synchronize()
            found = sum(first.elapsed_time(last) for first, last in self._events) / 1e3
            self._events.clear()
        return found

    def _timed(self, images: Any) -> Any:
        if not self._is_cuda:
            started = time.perf_counter()
            found = self._encode(images)
            self._host_s += time.perf_counter() - started
            return found
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        found = self._encode(images)
        last.record()
        self._events.append((first, last))
        return found


if __name__ == "__main__":
    main()
