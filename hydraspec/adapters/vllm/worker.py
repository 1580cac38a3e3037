"""A module that vLLM imports in each of its worker processes: a loader of random weights.

vLLM finds it by name (`worker_extension_cls`), also in processes on other hosts. The package must
be importable there. Checked against the sources of vLLM 0.33.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from hydraspec.adapters.vllm.weights import LOAD_FORMAT, fill, order_tokens, random_weights

_unfilled: list[str] = []  # of this process


class Extension:
    """Methods that vLLM adds to its worker, for `collective_rpc`."""

    def hydraspec_unfilled(self) -> list[str]:
        """Names of parameters of this worker's target that the native engine does not have."""
        return _unfilled


def register_loader() -> None:
    """Makes LOAD_FORMAT known to vLLM."""
    from vllm.config import LoadConfig
    from vllm.model_executor.model_loader import (
        BaseModelLoader,
        DummyModelLoader,
        register_model_loader,
    )

    @register_model_loader(LOAD_FORMAT)
    class RandomLoader(BaseModelLoader):  # type: ignore[misc]
        """Fills a target with the weights that the native engine draws; drafters keep vLLM's dummy
        weights.
        """

        def download_model(self, model_config: Any) -> None:
            """Does nothing: weights are drawn, not downloaded."""

        def load_weights(self, model: nn.Module, model_config: Any) -> None:
            """Fills this rank's part of the model, on the model's own device."""
            if model_config.runner_type == "draft":
                dummy = DummyModelLoader(LoadConfig(load_format="dummy"))
                dummy.load_weights(model, model_config)
                order_tokens(model)
                return
            weights = random_weights(
                Path(model_config.model),
                dtype=model_config.dtype,
                device=next(model.parameters()).device,
                seed=int(self.load_config.model_loader_extra_config["seed"]),
            )
            _unfilled[:] = fill(model, weights)


register_loader()
