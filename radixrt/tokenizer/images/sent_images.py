"""The images that a scheduler has: the cache of their features, bounded in bytes.

The workers hold the features of all images that were sent and not dropped. Those without a user
stay for the next turns of their chats, so that neither a later turn nor KV that was evicted runs
the tower again.
"""

import functools
from collections.abc import Callable, Iterable

import msgspec

from radixrt.base.errors import RequestError
from radixrt.base.image_parts import IDLE_IMAGE_BYTES
from radixrt.messages.images import DropImage, HurryImage, ImageKey
from radixrt.messages.requests import IdleKind
from radixrt.tokenizer.images.processed_image import ProcessedImage
from radixrt.tokenizer.sent_parts import SentParts

MAX_USED_BYTES = 2 << 30
"""Memory of images that answers use or wait for, pixels and features; more are refused for now."""

MAX_IDLE_IMAGES = 4096


class SentImages(SentParts):
    """See ``SentParts``.

    Args:
        by_file: the workers are on this machine, and read the files of large images.
    """

    def __init__(
        self,
        to_scheduler: Callable[[msgspec.Struct], None],
        *,
        by_file: bool = False,
        max_idle_bytes: int = IDLE_IMAGE_BYTES,
        max_used_bytes: int = MAX_USED_BYTES,
    ) -> None:
        super().__init__(
            to_scheduler, DropImage, max_idle_bytes=max_idle_bytes, max_idle=MAX_IDLE_IMAGES
        )
        self._max_used_bytes = max_used_bytes
        self._by_file = by_file
        self._not_hurried: set[ImageKey] = set()
        """Those that no answer has used but for idle times."""

    def check_room(self, images: Iterable[ProcessedImage]) -> None:
        """Check that images can be used beside those in use.

        Raises:
            RequestError: they are too many at a time.
        """
        new = {one.key: one for one in images if not self.has(one.key)}
        needed = sum(one.num_bytes for one in new.values())
        if self.used_bytes and self.used_bytes + needed > self._max_used_bytes:
            raise RequestError(
                "The server has too many images at work; retry later.", status=503, retry_after_s=5
            )

    def use(self, image: ProcessedImage, idle: IdleKind = "") -> None:
        """``use_part`` of an image.

        Args:
            idle: whether it is for idle times; the first other answer hurries it.
        """
        is_new = not self.has(image.key)
        order = functools.partial(image.load_order, by_file=self._by_file, idle=idle)
        self.use_part(image.key, image.num_bytes, order)
        if is_new and idle:
            self._not_hurried.add(image.key)
        elif not idle and image.key in self._not_hurried:
            self._not_hurried.remove(image.key)
            self._to_scheduler(HurryImage(image.key))

    def _drop(self, key: bytes) -> None:
        self._not_hurried.discard(key)
        super()._drop(key)
