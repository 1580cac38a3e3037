"""The order of floating-point numbers as whole numbers, for searches; part of `truncation`."""
