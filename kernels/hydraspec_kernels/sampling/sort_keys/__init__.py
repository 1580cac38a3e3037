"""The order of floating-point numbers as integers, for binary searches of thresholds."""
