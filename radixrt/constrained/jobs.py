"""What do the tokenizer process and its compiler helpers say to each other? Frames of msgpack over two pipes.

A frame is its length in 8 bytes, little-endian, then that many bytes.
"""

import struct
from typing import BinaryIO

import msgspec

from radixrt.constrained.grammar import Compiled
from radixrt.constrained.route import CompileOptions
from radixrt.constrained.span_error import SpanError
from radixrt.constrained.spec import Spec

LENGTH = struct.Struct("<Q")


class HelperConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The first frame that a helper gets."""

    tokenizer_json: str
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    options: CompileOptions
    memory_limit_bytes: int


class CompileJob(msgspec.Struct, frozen=True, tag=True):
    """Answered by a CompileDone, or one of the failures."""

    spec: Spec


class ValidateJob(msgspec.Struct, frozen=True, tag=True):
    """Does a text satisfy a schema? Answered by a ValidateDone, or one of the failures."""

    schema: str
    """JSON text."""
    text: str


Job = CompileJob | ValidateJob


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The helper has loaded the tokenizer."""


class CompileDone(msgspec.Struct, frozen=True, tag=True):
    compiled: Compiled


class ValidateDone(msgspec.Struct, frozen=True, tag=True):
    """Empty if the text is valid."""

    errors: list[SpanError]


class Refused(msgspec.Struct, frozen=True, tag=True):
    """A RequestError that the job raised."""

    message: str
    status: int
    param: str | None
    code: str | None


class OutOfMemory(msgspec.Struct, frozen=True, tag=True):
    """The job needed more than the limit, and could be stopped."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Anything else: a mistake in radixrt or in a library; also the reason why a helper can't start."""

    reason: str


Reply = Ready | CompileDone | ValidateDone | Refused | OutOfMemory | Failed

encode = msgspec.msgpack.Encoder().encode
decode_job = msgspec.msgpack.Decoder(Job).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode
decode_config = msgspec.msgpack.Decoder(HelperConfig).decode


def frame(body: bytes) -> bytes:
    return LENGTH.pack(len(body)) + body


def read_frame(stream: BinaryIO) -> bytes | None:
    """The next frame's body; None at the end of the stream."""
    head = stream.read(LENGTH.size)
    if len(head) < LENGTH.size:
        return None
    (size,) = LENGTH.unpack(head)
    body = stream.read(size)
    return body if len(body) == size else None
