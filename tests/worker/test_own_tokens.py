"""A head drafts tokens beyond its vocabulary that texts of the cache root have had, and no others;
a step copies few rows for that, and all roots together have a bounded number of them."""

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from radixrt.layers.kernels.choice import layer_kernels
from radixrt.messages.cache_root import CacheRoot
from radixrt.models.draft_vocabulary import CopiedRows
from radixrt.models.memory_need import _copied_bytes
from radixrt.worker.drafts import drafters, own_tokens
from radixrt.worker.drafts.own_tokens import AllOwnTokens, Owner, OwnTokens

FIRST, VOCABULARY, HIDDEN = 20, 100, 8


class Rows:
    """Pieces of rows of an LM head."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.lm_head = torch.randn(VOCABULARY, HIDDEN)
        self.copied: list[int] = []
        self.num_pieces = 0

    def __call__(self) -> "Piece":
        self.num_pieces += 1
        return Piece(self)


class Piece:
    def __init__(self, of: Rows) -> None:
        self._of = of
        self._rows = torch.zeros(of.size, HIDDEN)

    def copy(self, token_ids: Tensor, places: Tensor) -> None:
        self._of.copied += token_ids.tolist()
        self._rows[places] = self._of.lm_head[token_ids]

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self._rows.T


def held(own: AllOwnTokens, owner: Owner) -> OwnTokens:
    found = own.of(owner)
    assert found is not None
    return found


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Rows]:
    def make(size: int) -> Rows:
        monkeypatch.setattr(own_tokens, "PIECE", size)
        return Rows(size)

    return make


@pytest.mark.parametrize(("most", "size"), [(1, 4), (3, 1), (10, 4), (200, 7)])
def test_the_tokens_met_last_have_the_logits_of_the_lm_head(
    monkeypatch: pytest.MonkeyPatch, rows: Callable[[int], Rows], most: int, size: int
) -> None:
    monkeypatch.setattr(own_tokens, "MAX_OWN", most)
    rng, made = random.Random(most), rows(size)
    own = OwnTokens(FIRST, made)  # type: ignore[arg-type]
    assert own.scores(torch.randn(2, HIDDEN)) is None
    text: list[int] = []
    for _ in range(60):
        new = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(9))]
        text += new
        own.note(new)
        while own.num_unread:
            before = own.num_unread
            assert before - own.num_unread == own.read(2) - min(2, before)
            assert set(own.token_ids) <= {token for token in text if token >= FIRST}
        met_last = list(dict.fromkeys(t for t in reversed(text) if t >= FIRST))[:most]
        assert sorted(own.token_ids) == sorted(met_last)
        assert made.num_pieces == -(-len(own.token_ids) // size), "no piece before it is needed"
        if met_last:
            hidden = torch.randn(3, HIDDEN)
            torch.testing.assert_close(own.scores(hidden), hidden @ made.lm_head[own.token_ids].T)
    if most == 200:
        assert sorted(made.copied) == sorted(set(made.copied)), "each row is copied once"


def test_what_was_met_last_is_copied_first(rows: Callable[[int], Rows]) -> None:
    made = rows(4)
    own = OwnTokens(FIRST, made)  # type: ignore[arg-type]
    own.note([5, 90, 30, 80, 30, 31, 32, 80])
    assert own.read(3) == 3
    assert made.copied == [80, 32, 31]
    own.note([31, 40])
    assert own.read(1) == 1 and made.copied[3:] == [40]
    assert own.read(9) == 2 and made.copied[4:] == [30, 90]
    assert own.read(9) == 0


def test_a_step_copies_few_rows_whatever_prompts_and_roots_come(
    monkeypatch: pytest.MonkeyPatch, rows: Callable[[int], Rows]
) -> None:
    """Shared by all that draft; to begin copies none, and takes no memory."""
    monkeypatch.setattr(own_tokens, "MAX_READ", 10)
    made = rows(4)
    own = AllOwnTokens(FIRST, made)  # type: ignore[arg-type]
    owners: list[Owner] = [CacheRoot(salt="a"), 3, CacheRoot(salt="b"), CacheRoot(salt="none")]
    for owner in owners[:3]:
        own.begin(owner, np.arange(VOCABULARY, dtype=np.int32))
    own.begin(owners[3], np.arange(FIRST, dtype=np.int32))
    assert not made.copied and not made.num_pieces
    for step in range(1, 5):
        own.read([*owners, *owners])
        assert len(made.copied) == 10 * step
        counts = [len(held(own, one).token_ids) for one in owners]
        assert max(counts[:3]) - min(counts[:3]) <= step and counts[3] == 0
    for _ in range(40):
        own.read(owners[:1])
    assert sorted(held(own, owners[0]).token_ids) == [*range(FIRST, VOCABULARY)]


def test_of_a_long_prompt_the_last_tokens_are_noted(
    monkeypatch: pytest.MonkeyPatch, rows: Callable[[int], Rows]
) -> None:
    monkeypatch.setattr(own_tokens, "MAX_NOTED", 5)
    own = AllOwnTokens(FIRST, rows(4))  # type: ignore[arg-type]
    own.begin(0, np.array([*range(VOCABULARY), 1, 2, 3, 3], dtype=np.int32))
    assert held(own, 0).num_unread == 5


def test_all_roots_together_have_a_bounded_number_of_rows(
    monkeypatch: pytest.MonkeyPatch, rows: Callable[[int], Rows]
) -> None:
    """Those used last keep theirs, as in a list that moves what is used to its end."""
    monkeypatch.setattr(own_tokens, "OWN_IDS", 60)
    monkeypatch.setattr(own_tokens, "MAX_OWN", 20)
    monkeypatch.setattr(own_tokens, "MAX_READ", 13)
    monkeypatch.setattr(drafters, "MAX_ROOTS", 9)
    rng, made = random.Random(1), rows(4)
    own = AllOwnTokens(FIRST, made)  # type: ignore[arg-type]
    owners: list[Owner] = [*map(CacheRoot, "abcdefgh"), 0, 1, 2, 3]
    given_up, used = 0, list[Owner]()
    for _ in range(400):
        owner = rng.choice(owners)
        if isinstance(owner, int):
            own.release(owner)
            assert own.of(owner) is None
        begun = [rng.randrange(VOCABULARY) for _ in range(rng.randrange(30))]
        own.begin(owner, np.array(begun, dtype=np.int32))
        for one in rng.sample(owners, rng.randrange(4)):
            if (found := own.of(one)) is not None:
                found.note([rng.randrange(VOCABULARY)])
        used = [*(one for one in used if one != owner), owner]
        drafting = [owner, *rng.sample(owners, 2)]
        waiting = [one for one in drafting if (found := own.of(one)) and found.num_unread]
        own.read(drafting)
        used = [one for one in used if one not in waiting] + list(dict.fromkeys(waiting))
        left = [one for one in owners if own.of(one) is not None]
        assert 4 * sum(len(held(own, one).pieces) for one in left) <= 60
        used = used[-len(left) :]
        assert set(used) == set(left)
        given_up += len(left) < 9
    assert given_up > 100


def test_the_memory_of_the_rows_is_counted() -> None:
    """And one more matrix has numbers of its own."""
    hidden, size = 320, own_tokens.PIECE
    head = torch.randn(4000, hidden, dtype=torch.bfloat16)

    class Model:
        dtype = torch.bfloat16
        scaled = staticmethod(lambda x: x)

        class output_head:
            columns = hidden
            forward = staticmethod(lambda token_ids: head[token_ids])

    new = CopiedRows(Model, size, layer_kernels(torch.device("cpu"))).another  # type: ignore[arg-type]
    own = AllOwnTokens(0, new)
    own.begin(0, np.arange(3 * size - 1, dtype=np.int32))
    while held(own, 0).num_unread:
        own.read([0])
    found = held(own, 0)
    states = torch.randn(2, hidden, dtype=torch.bfloat16)
    scores, expected = found.scores(states), states.float() @ head[found.token_ids].float().T
    assert scores is not None
    assert torch.nn.functional.cosine_similarity(scores, expected).min() > 0.999
    in_memory = sum(
        buffer.nbytes for piece in found.pieces for buffer in piece.state_dict().values()
    )
    text = {"vocab_size": 1 << 20, "hidden_size": hidden}
    counted = _copied_bytes(text, 3 * size) - _copied_bytes(text)
    assert counted == in_memory
