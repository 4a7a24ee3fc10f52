"""What does ``LLM.pin`` give back? A hold on a prompt's KV, to be let go of."""

import contextlib
from collections.abc import Callable

from radixrt.base.errors import RequestError
from radixrt.kv.warming import Warmed
from radixrt.messages.replies import LeaseGranted


class PinnedPrompt:
    """A prompt whose KV stays until the end of a ``with`` block, :meth:`release`, or its time.

    Attributes:
        lease: the lease's name, for ``LLM.release`` and ``/v1/cache/release``.
        pinned_tokens: leading tokens of the prompt that stay; all but a last page that is not full.
        num_prompt_tokens: tokens of the prompt.
        cached_tokens: of those, found in the radix tree.
        expires_in_s: seconds that the lease lasts, from its beginning.
    """

    def __init__(self, lease: LeaseGranted, warmed: Warmed, release: Callable[[str], int]) -> None:
        self.lease = lease.lease
        self.pinned_tokens = lease.pinned_tokens
        self.expires_in_s = lease.expires_in_s
        self.num_prompt_tokens = warmed.prompt_tokens
        self.cached_tokens = warmed.cached_tokens
        self._release = release

    def release(self) -> int:
        """Let go; returns the tokens that were pinned.

        Raises:
            RequestError: it had ended, or was let go of before.
        """
        return self._release(self.lease)

    def __enter__(self) -> "PinnedPrompt":
        return self

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(RequestError):  # its time was over
            self.release()
