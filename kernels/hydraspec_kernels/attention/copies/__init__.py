"""The warp that only copies."""
