"""Counter-based random numbers: a draw is a pure function of its key, on every device the same.

There is no generator state. Kernels draw through the device functions of `kernel.py`, bit for bit
the words of the torch code here.
"""

from hydraspec_kernels.sampling.random_streams.reference import (
    MAX_INDEX,
    Purpose,
    exponential_race,
    stream_key,
    uniform,
)

__all__ = ["MAX_INDEX", "Purpose", "exponential_race", "stream_key", "uniform"]
