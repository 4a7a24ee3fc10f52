"""Messages that bring images from the tokenizer process by way of the scheduler to the workers.

An image is named by its digest: SHA-256 over the processor's tensor with its shape and dtype, the
processor's settings and the weights of the tower. It travels once, ahead of the first sequence that
names it, and is dropped when it has been unused for long: the tokenizer process owns its life, as
that of a grammar (:mod:`radixrt.messages.grammars`).
"""

import hashlib
import struct

import msgspec
import numpy as np

from radixrt.messages.ids import TokenIds
from radixrt.messages.message import Message
from radixrt.messages.requests import IdleKind

ImageKey = bytes
"""The digest of an image, 32 bytes."""

SHORTEST_PAGE = 4
"""Tokens of a page at least where images are served: each position adds 31 bits to what tells a
page of one image from that of another."""


class VisionInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about the tower of a served checkpoint, for whoever prepares images for it."""

    family: str
    """Names the form of the placeholders, a key of ``radixrt.tokenizer.images.families``."""
    weights: bytes
    """SHA-256 over the tower's weights."""
    tokens_per_tile: int
    """Placeholders of one picture that the tower sees: a whole image, or a tile of it. 0: pictures
    have sizes of their own."""
    tile_size: int
    """Height and width of such a picture, in pixels; 0 with those sizes."""
    unit: int = 0
    """With sizes of their own: rows and columns of an image's tensor for which one placeholder
    stands."""
    has_axes: bool = False
    """Placeholders have positions in three axes (M-RoPE)."""
    whole_images: bool = False
    """The placeholders of an image see one another in both directions, so that a step computes all
    of them or none."""
    image_token: int
    """Token id of a placeholder."""
    feature_bytes: int
    """Memory of the features of one placeholder."""


class ImageRun(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive placeholders of one image in a prompt."""

    image: ImageKey
    start: int
    """Position of the first in the prompt."""
    num_tokens: int
    first: int = 0
    """Row of the image's features for the first of them."""
    columns: int = 0
    """Placeholders of a row of the image, where they have positions in three axes: time, height
    and width; 0: positions count tokens."""

    @property
    def positions_less(self) -> int:
        """Positions that the text behind it is nearer than tokens are: an image takes as many as
        its longer side has placeholders."""
        if not self.columns:
            return 0
        return self.num_tokens - max(self.columns, -(-self.num_tokens // self.columns))


class LoadImage(Message, frozen=True, kw_only=True):
    """Run the tower on an image, for the sequences to come. Every rank answers the scheduler with
    an ImageLoaded."""

    key: ImageKey
    pixels: bytes
    """float32, little-endian; none, if they are in a file."""
    shape: tuple[int, ...]
    """[tiles, channels, height, width]; of towers that read patches, [1, rows of patches, columns,
    values of a patch]"""
    file: str = ""
    """Path of a file with the pixels of a large image, which the scheduler removes when all ranks
    have answered."""
    idle: IdleKind = ""
    """The tower works on it in idle times only, until it is hurried."""


class HurryImage(Message, frozen=True):
    """Run the tower on this image now: it was wanted for idle times, and now an answer waits."""

    key: ImageKey


class DropImage(Message, frozen=True):
    """No sequence to come names this image, unless it is loaded again."""

    key: ImageKey


class ImageLoaded(Message, frozen=True, kw_only=True):
    """One rank has the features of an image, or could not compute them."""

    key: ImageKey
    error: str | None = None


def image_key_ids(key: ImageKey, first: int, count: int) -> TokenIds:
    """The ids that stand for the placeholders of an image where prefixes are compared: [count]
    int32, all negative, so that none is a token. Each is 31 bits of SHA-256 over the image's digest
    and the placeholder's number.

    >>> image_key_ids(bytes(32), 0, 3).tolist() == [*image_key_ids(bytes(32), 0, 2).tolist(),
    ...     *image_key_ids(bytes(32), 2, 1).tolist()]
    True
    """
    ids = np.empty(count, dtype=np.int64)
    for offset in range(count):
        digest = hashlib.sha256(key + struct.pack("<q", first + offset)).digest()
        ids[offset] = -1 - (int.from_bytes(digest[:4], "little") & 0x7FFFFFFF)
    return ids.astype(np.int32)
