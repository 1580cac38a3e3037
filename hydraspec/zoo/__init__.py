"""Tiny trained Gemma 4 checkpoints, their assistants, and the recipe that makes them."""
