"""P-EAGLE (arXiv 2602.01469): an EAGLE-3 head whose mask rows guess the tokens after the newest."""

from __future__ import annotations

from torch import Tensor

from hydraspec.models.base import TargetModel
from hydraspec.models.eagle import EagleHead
from hydraspec.models.eagle_loading import load_eagle
from hydraspec.speculators.parallel import MaskRow, ParallelSpeculator


class PEagleSpeculator(ParallelSpeculator):
    """`method=peagle`. A mask row reads the mask token and the projected mask state."""

    head: EagleHead

    def load_draft_model(self, target: TargetModel, checkpoint: str) -> EagleHead:
        method = self.config.method
        return load_eagle(
            checkpoint,
            method=method.name,
            weights=method.weights.value,
            target=target,
            seed=self.config.seed,
        )

    def mask_row(self) -> MaskRow:
        token, hidden = self.head.spec.mask_token_id, self.head.mask_hidden
        assert token is not None, "a P-EAGLE head is loaded with a mask token"
        assert hidden is not None, "and a mask state"
        return MaskRow(token_id=token, hidden=hidden)

    @property
    def draft_vocab_map(self) -> Tensor | None:
        return self.head.vocab_map
