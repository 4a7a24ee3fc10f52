"""The messages about LoRA adapters: which there are, and how one is loaded beside the steps.

An adapter has a *place* in the workers' stacks while it is loaded. The scheduler gives the places:
it orders every rank to read an adapter into a place that no sequence uses (:class:`LoadAdapter`),
and when all have read the same bytes, to compute with it (:class:`PutAdapter`), ahead of the first
plan that uses it.
"""

import msgspec

from radixrt.messages.message import Message

NO_ADAPTER = -1
"""Stands for a place: the base model."""


class AdapterInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A loaded adapter."""

    name: str
    """The name by which requests ask for it."""
    digest: str
    """SHA-256 of its tensors and scalings, in hexadecimal digits."""
    path: str
    """The folder from which it was read."""
    place: int
    """Its number in the workers."""
    invocation: tuple[int, ...] = ()
    """The tokens from whose last occurrence in the prompt on an activated adapter works; empty: it
    works on the whole sequence."""


class LoadAdapter(Message, frozen=True, kw_only=True):
    """Read an adapter into a place, beside the steps. Every rank answers with an AdapterRead."""

    place: int
    path: str


class AdapterRead(Message, frozen=True, kw_only=True):
    """One rank has read an adapter, or could not."""

    place: int
    digest: str = ""
    invocation: tuple[int, ...] = ()
    error: str | None = None


class PutAdapter(Message, frozen=True, kw_only=True):
    """Compute with the adapter that was read into a place, from the next step on."""

    place: int
