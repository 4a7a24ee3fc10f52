"""Which part of a prompt does a server still have? What was sent once, or came from there, is referred to by its id.

Prompts are compared by their beginnings: each message, or each block of a text, has a digest of all that comes up to its
end. So a branch finds the conversation that it left, a conversation that was changed finds the part before the change, and
nothing is held here but digests.
"""

import hashlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from radixrt.lang.backends.protocol import Prompt
from radixrt.lang.prefixes import num_chars

SHORTEST_CHARS = 2048
"""Shorter prompts are sent whole: it costs less than to look."""
BLOCK_CHARS = 256
"""A text is compared in steps of so many characters; at most so many are sent once more."""
MOST_PREFIXES = 1 << 16
"""Remembered here, of about 200 bytes each; the least recently used go first."""


@dataclass(frozen=True)
class KeptPrefix:
    """The beginning of a prompt, on the server."""

    conversation: str
    """The id of the response that it was kept with."""
    length: int
    """How much of that conversation: messages, or characters."""


class KeptPrompts:
    """What one server keeps, as far as it is known here. Lives in the runtime's event loop."""

    def __init__(self) -> None:
        self._prefixes: OrderedDict[bytes, KeptPrefix] = OrderedDict()

    def longest(self, prompt: Prompt) -> KeptPrefix | None:
        """The longest beginning of a prompt that the server keeps."""
        found = None
        for digest, _ in _prefixes(prompt):
            if digest in self._prefixes:
                self._prefixes.move_to_end(digest)
                found = self._prefixes[digest]
        return found

    def kept(self, conversation: str, whole: Prompt) -> None:
        """The server keeps this prompt, its answer included, under an id."""
        for digest, length in _prefixes(whole):
            self._prefixes[digest] = KeptPrefix(conversation, length)
            self._prefixes.move_to_end(digest)
        while len(self._prefixes) > MOST_PREFIXES:
            self._prefixes.popitem(last=False)

    def gone(self, conversation: str) -> None:
        """The server has forgotten it."""
        for digest in [d for d, p in self._prefixes.items() if p.conversation == conversation]:
            del self._prefixes[digest]


def is_long(prompt: Prompt) -> bool:
    """Whether it pays to refer to what was sent before."""
    return num_chars(prompt) >= SHORTEST_CHARS


def _prefixes(prompt: Prompt) -> Iterator[tuple[bytes, int]]:
    """A digest of each beginning, and its length; the shortest first."""
    if isinstance(prompt, str):
        state = hashlib.blake2b(b"text", digest_size=16)
        for end in range(BLOCK_CHARS, len(prompt) + 1, BLOCK_CHARS):
            state.update(prompt[end - BLOCK_CHARS : end].encode("utf-8", "surrogatepass"))
            yield state.digest(), end
        return
    state = hashlib.blake2b(b"messages", digest_size=16)
    for number, message in enumerate(prompt, 1):
        state.update(msgspec.json.encode(message))  # an object says itself where it ends
        yield state.digest(), number
