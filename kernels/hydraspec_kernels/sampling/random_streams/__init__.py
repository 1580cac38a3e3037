"""Counter-based random numbers: a draw is a pure function of its key, on every device the same.

There is no generator state. `kernel.py` has the same arithmetic as device functions, bit for bit.
"""

from hydraspec_kernels.sampling.random_streams.reference import (
    MAX_INDEX,
    DrawKey,
    Purpose,
    exponential_race,
    stream_key,
    uniform,
)

__all__ = ["MAX_INDEX", "DrawKey", "Purpose", "exponential_race", "stream_key", "uniform"]
