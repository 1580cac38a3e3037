"""Shared parts of all kernels: how they launch and compile, and where a capture is cut."""
