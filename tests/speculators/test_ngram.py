"""Drafts copied from the text, against a plain loop over lists."""

from __future__ import annotations

import pytest
import torch
from hydraspec_kernels.lookup import continued

SEED = 20
UNSET = 99  # what stands after a text in its row


def plain_drafts(text: list[int], num_drafts: int, least: int, most: int) -> list[int]:
    """Drafts by the definition: the longest match first, of equally long ones the latest."""
    for length in range(most, least - 1, -1):
        for end in range(len(text) - 2, length - 2, -1):
            if text[end - length + 1 : end + 1] == text[len(text) - length :]:
                drafts = list(text)
                for i in range(num_drafts):
                    drafts.append(drafts[end + 1 + i])
                return drafts[len(text) :]
    return [-1] * num_drafts


def test_drafts_equal_a_plain_loop_over_500_histories() -> None:
    """Catches a match that runs past a row's start, an earlier place taken for the latest, a
    shorter match for the longest, and what stands after the text read as a part of it."""
    draw = torch.Generator().manual_seed(SEED)
    for least, most, num_drafts in ((1, 1, 3), (1, 4, 5), (2, 3, 8), (3, 3, 1), (2, 9, 4)):
        texts = [
            torch.randint(0, 2 + i % 4, (1 + i % 37,), generator=draw).tolist() for i in range(100)
        ]
        rows = torch.full((100, 40), UNSET)
        for row, text in zip(rows, texts, strict=True):
            row[: len(text)] = torch.tensor(text)
            row[len(text) :] = text[-1]  # old drafts: another place of the last token
        last = torch.tensor([len(text) - 1 for text in texts])
        asked = {"num_drafts": num_drafts, "least": least, "most": most}
        found = continued(rows, torch.arange(100), last, **asked)
        assert found.tolist() == [plain_drafts(t, num_drafts, least, most) for t in texts]


@pytest.mark.parametrize(
    ("text", "drafts"),
    [
        pytest.param([1, 2, 3, 1, 2], [3, 1, 2, 3], id="the text goes on repeating itself"),
        pytest.param([7, 7, 7], [7, 7, 7, 7], id="one token again and again"),
        pytest.param([5, 1, 2, 6, 1, 2, 8, 1, 2], [8, 1, 2, 8], id="the latest of two places"),
        pytest.param([4, 1, 2, 9, 1, 2, 8, 4, 1, 2], [9, 1, 2, 8], id="the longest match"),
        pytest.param([1, 2, 3, 4], [-1] * 4, id="nothing stood before"),
        pytest.param([1], [-1] * 4, id="one token"),
    ],
)
def test_drafts_of_short_texts(text: list[int], drafts: list[int]) -> None:
    rows, last = torch.tensor([text]), torch.tensor([len(text) - 1])
    found = continued(rows, torch.tensor([0]), last, num_drafts=4, least=1, most=3)
    assert found.tolist() == [drafts]
