"""Engines of vLLM over a fake of its interface."""

from vllm_engines import start

__all__ = ["start"]
