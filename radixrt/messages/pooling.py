"""Pooling: the numbers that a prompt gives in place of an answer."""

from typing import Literal

import msgspec


class PoolingRequest(msgspec.Struct, frozen=True, array_like=True):
    """Asks for numbers of a prompt in place of an answer."""

    logits_of: tuple[int, ...] = ()
    """Tokens whose logits behind the prompt are returned. Empty: the numbers that the checkpoint's
    pooling gives."""


DEFAULT_POOLING = PoolingRequest()
"""A vector of an embedding model, or the scores of the classes of a classifier."""


class PoolingInfo(msgspec.Struct, frozen=True, kw_only=True):
    """The numbers that a served checkpoint gives in place of text."""

    task: Literal["embed", "classify"]
    """A vector, or a score for each class."""
    size: int
    """Number of numbers of a prompt."""
    normalized: bool = False
    """Vectors have length 1."""
    labels: tuple[str, ...] = ()
    """Names of the classes."""
    dimensions: tuple[int, ...] = ()
    """Lengths to which the vectors may be cut; empty: any."""
    whole_prompts: bool = False
    """The model is an encoder: each prompt is computed in one step, and none is cached."""
