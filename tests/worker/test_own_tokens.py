"""A head drafts tokens beyond its vocabulary that texts of the cache root have had, and no others."""

import random

import pytest
import torch
from torch import Tensor

from radixrt.worker.drafts import own_tokens
from radixrt.worker.drafts.own_tokens import OwnTokens

FIRST, VOCABULARY, HIDDEN = 20, 100, 8


class Rows:
    """Rows of an LM head."""

    def __init__(self, count: int) -> None:
        self.lm_head = torch.randn(VOCABULARY, HIDDEN)
        self.copied: list[int] = []
        self._rows = torch.zeros(count, HIDDEN)

    def copy(self, token_ids: Tensor, places: Tensor) -> None:
        self.copied += token_ids.tolist()
        self._rows[places] = self.lm_head[token_ids]

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self._rows.T


@pytest.mark.parametrize("most", [1, 3, 10, 200])
def test_the_tokens_met_last_have_the_logits_of_the_lm_head(
    monkeypatch: pytest.MonkeyPatch, most: int
) -> None:
    monkeypatch.setattr(own_tokens, "MAX_OWN", most)
    rng, rows = random.Random(most), Rows(most)
    own = OwnTokens(FIRST, rows)  # type: ignore[arg-type]
    assert own.scores(torch.randn(2, HIDDEN)) is None
    text: list[int] = []
    for _ in range(60):
        new = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(4))]
        text += new
        for token in new:  # one at a time: which were met last is then known
            own.note([token])
            own.scores(torch.randn(1, HIDDEN))
        met_last = list(dict.fromkeys(t for t in reversed(text) if t >= FIRST))[:most]
        assert sorted(own.token_ids) == sorted(met_last)
        if met_last:
            hidden = torch.randn(3, HIDDEN)
            scores = own.scores(hidden)
            torch.testing.assert_close(scores, hidden @ rows.lm_head[own.token_ids].T)
    if most == 200:
        assert sorted(rows.copied) == sorted(set(rows.copied)), "each row is read once"


def test_of_many_new_tokens_the_last_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_tokens, "MAX_OWN", 3)
    rows = Rows(3)
    own = OwnTokens(FIRST, rows)  # type: ignore[arg-type]
    own.note([5, 90, 30, 80, 30, 31, 32, 80])
    own.scores(torch.randn(1, HIDDEN))
    assert rows.copied == [31, 32, 80]
    own.note([31, 40])
    own.scores(torch.randn(1, HIDDEN))
    assert set(own.token_ids) == {80, 31, 40}
