"""Tiny trained checkpoints of four families, their drafters, and the recipe that makes them."""
