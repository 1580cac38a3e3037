"""P-EAGLE (arXiv 2602.01469): an EAGLE-3 head whose mask rows guess the tokens after the newest."""

from __future__ import annotations

from hydraspec.speculators.eagle import EagleDrafter
from hydraspec.speculators.parallel import MaskRow, MaskRowSpeculator


class PEagleSpeculator(EagleDrafter, MaskRowSpeculator):
    """Drafter of `method=peagle`: mask rows read the mask token and the projected mask state."""

    def mask_row(self) -> MaskRow:
        token, hidden = self.head.spec.mask_token_id, self.head.mask_hidden
        assert token is not None, "a P-EAGLE head is loaded with a mask token"
        assert hidden is not None, "and a mask state"
        return MaskRow(token_id=token, hidden=hidden)
