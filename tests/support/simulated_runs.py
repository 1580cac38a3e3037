"""Pairs of runs simulated from recorded ones: six repeats of the default run (64 requests, four at
once) on a busy machine, each request's decode tokens and milliseconds, with and without drafts.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

RECORDED = Path(__file__).parents[1] / "study" / "recorded.json"
TOGETHER = 8  # requests whose noise is drawn together: twice those that run at once
DRIFT = 0.4  # standard deviation of the logarithm of the machine's speed between runs
Array = NDArray[np.float64]


def recorded() -> Array:
    """[repeats, R, 4]: decode tokens and ms of the method, and of the baseline."""
    return np.array(json.loads(RECORDED.read_text(encoding="utf-8")), float)


class Machine:
    """Draws runs of the same prompts: the recorded pace of each request, times noise that single
    recorded repeats had around it, times the machine's speed during the run."""

    def __init__(self, seed: int, *, num_requests: int = 64) -> None:
        self.rng = np.random.default_rng(seed)
        runs = recorded()
        self.pace = np.exp(np.log(runs[:, :, [1, 3]]).mean(axis=0))  # [R, 2]
        noise = np.log(runs[:, :, [1, 3]] / self.pace)
        self.noise = noise - noise.mean(axis=1, keepdims=True)  # [repeats, R, 2]
        self.prompts = np.arange(num_requests) % runs.shape[1]
        self.tokens = runs[0][:, [0, 2]]

    def run(self, *, faster: float = 1.0) -> Array:
        """One run's columns [4, R]; `faster` is what the method's speed is multiplied by."""
        times = np.empty((len(self.prompts), 2))
        for side in range(2):
            for first in range(0, len(self.prompts), TOGETHER):
                part = self.prompts[first : first + TOGETHER]
                repeat = self.rng.integers(len(self.noise))
                at = self.rng.integers(self.noise.shape[1]) + np.arange(len(part))
                noise = self.noise[repeat, at % self.noise.shape[1], side]
                times[first : first + TOGETHER, side] = self.pace[part, side] * np.exp(noise)
        times *= np.exp(self.rng.normal(0, DRIFT))
        times[:, 0] /= faster
        tokens = self.tokens[self.prompts]
        return np.stack([tokens[:, 0], times[:, 0], tokens[:, 1], times[:, 1]])
