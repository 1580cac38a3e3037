"""What kernels of all rooms share: how they launch and compile, and where a capture is cut."""
