"""The random streams of sampling: a draw is a pure function of its key, so batches and devices
agree.

The arithmetic lives with the kernels, which draw the same numbers inside a launch.
"""

from hydraspec_kernels.sampling.random_streams import (
    MAX_INDEX,
    Purpose,
    exponential_race,
    stream_key,
    uniform,
)

__all__ = ["MAX_INDEX", "Purpose", "exponential_race", "stream_key", "uniform"]
