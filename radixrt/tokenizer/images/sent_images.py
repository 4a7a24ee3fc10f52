"""The images that a scheduler has: the cache of their features, bounded in bytes.

The workers hold the features of all images that were sent and not dropped. Those without a user
stay for the next turns of their chats, so that neither a later turn nor KV that was evicted runs
the tower again.
"""

from collections.abc import Callable, Iterable

import msgspec

from radixrt.base.errors import RequestError
from radixrt.base.image_parts import IDLE_IMAGE_BYTES
from radixrt.messages.images import DropImage
from radixrt.tokenizer.images.processor import ProcessedImage
from radixrt.tokenizer.sent_parts import SentParts

MAX_USED_BYTES = 2 << 30
"""Memory of images that answers use or wait for, pixels and features; more are refused for now."""

MAX_IDLE_IMAGES = 4096


class SentImages(SentParts):
    """See ``SentParts``."""

    def __init__(
        self,
        to_scheduler: Callable[[msgspec.Struct], None],
        *,
        max_idle_bytes: int = IDLE_IMAGE_BYTES,
        max_used_bytes: int = MAX_USED_BYTES,
    ) -> None:
        super().__init__(
            to_scheduler, DropImage, max_idle_bytes=max_idle_bytes, max_idle=MAX_IDLE_IMAGES
        )
        self._max_used_bytes = max_used_bytes

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

    def use(self, image: ProcessedImage) -> None:
        """``use_part`` of an image."""
        self.use_part(image.key, image.num_bytes, image.load_order)
