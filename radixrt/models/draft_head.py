"""The interface of draft heads: small networks that draft tokens from hidden states of the model."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from radixrt.attention.backend import ForwardContext
from radixrt.layers.norm import RMSNorm
from radixrt.models.draft_vocabulary import CopiedRows


class DraftHead(nn.Module, ABC):
    """One decoder layer. Its input at a token is the token's embedding, and a state: the model's
    behind the token before it, or, where the model has not computed that token yet, its own."""

    drafter: str
    """The name of what it drafts, of ``DRAFTERS``."""
    hidden_size: int
    """Features of a state."""
    state_size: int
    """Features of what the model gives for a state, before :meth:`fuse`."""
    reads: tuple[int, ...] = ()
    """Layers of the model whose inputs it reads; none: it reads what the LM head reads, of every
    token."""
    norm: RMSNorm
    """The norm before its LM head."""
    token_ids: Tensor
    """[draft vocabulary] int64: the model's id of each of its own."""
    more_rows: Callable[[], CopiedRows] | None = None
    """Makes a matrix for PIECE further tokens, by which they are drafted too; None: they are not.
    Else the head's own vocabulary is the lowest ids."""

    @property
    @abstractmethod
    def attention(self) -> Any:
        """The attention of the layer, whose KV cache is the first of its context."""

    def prepare_positions(self, end: int) -> None:
        """Call before positions up to ``end`` are computed."""
        self.attention.rotary.compute_up_to(end)

    @abstractmethod
    def fuse(self, states: Tensor) -> Tensor:
        """[rows, state_size] -> [rows, hidden_size], which share no memory with ``states``"""

    @abstractmethod
    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        states: Tensor,
        context: ForwardContext,
        wanted: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute the layer.

        Args:
            token_ids: [rows]
            positions: [rows]
            states: [rows, hidden_size] of the model behind the tokens before these, or of the head
                itself. They may be overwritten.
            wanted: int64, the rows whose results are wanted, perhaps none; None: all. Of the others
                nothing is computed behind the attention.

        Returns:
            [rows or len(wanted), hidden_size] twice: for :meth:`logits`, and the states for the
            next tokens.
        """

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, hidden_size] -> [rows, draft vocabulary] float32"""
