"""Messages between the tokenizer process, the zygote of its compiler helpers, and the helpers:
frames of msgpack over sockets.

A frame is its length in 8 bytes, little-endian, then that many bytes.
"""

import struct
from typing import BinaryIO

import msgspec

from radixrt.base.settings.setting import GrammarBackendName, WhitespaceName
from radixrt.constrained.advice import Advice
from radixrt.constrained.backends.tag_schemas import KeptSchemas
from radixrt.constrained.constraint import Constraint
from radixrt.constrained.grammar import Compiled, SpanError

LENGTH = struct.Struct("<Q")


class CompileOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of the server, for all requests."""

    backend: GrammarBackendName = "auto"
    """``llguidance`` compiles regular expressions and choices too, without finite-state machines.
    All others are ``auto``."""
    whitespace: WhitespaceName = "flexible"
    """``flexible``: at each gap of a JSON text a space, or a newline and indentation. ``compact``:
    nothing."""
    max_source_bytes: int = 16 << 20
    """Longest schema, pattern, grammar or set of options, in UTF-8."""
    validates: bool = False
    """Every finished answer is validated."""


class PoolConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The tokenizer, and the limits of compiling. The first frame that the zygote gets."""

    tokenizer_json: str
    """Path of the model's tokenizer.json, beside which the tokens may be saved."""
    vocab_size: int
    """The model's: the length of a row of logits."""
    eos_token_ids: tuple[int, ...]
    options: CompileOptions = CompileOptions()
    num_helpers: int = 2
    """Processes, at least 2. All but one may be busy with slow jobs at a time."""
    time_limit_s: float = 10.0
    """Time for one job, after which it is an error."""
    patience_s: float = 0.3
    """A job that takes longer is slow."""
    memory_limit_bytes: int = 1 << 30
    """Memory of one helper beyond what it has when idle."""
    cache_bytes: int = 256 << 20
    """Memory of the cache of compiled grammars."""
    cache_entries: int = 2048
    """Compiled grammars in the cache; small ones are compiled again within milliseconds."""
    max_waiting: int = 1024
    """Jobs; more are refused with 503."""


class CompileJob(msgspec.Struct, frozen=True, tag=True):
    """Answered by a CompileDone, or one of the failures."""

    constraint: Constraint
    schemas: KeptSchemas = {}
    """What is known of the schemas in the constraint's tags."""


class AdviseJob(msgspec.Struct, frozen=True, tag=True):
    """Answered by an AdviseDone, or one of the failures."""

    constraint: Constraint


class ValidateJob(msgspec.Struct, frozen=True, tag=True):
    """Validate a text against a schema. Answered by a ValidateDone, or one of the failures."""

    schema: str
    """JSON text."""
    text: str


Job = CompileJob | AdviseJob | ValidateJob


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The zygote has loaded the tokens, and can make helpers."""


class Fork(msgspec.Struct, frozen=True, tag=True):
    """Asks the zygote, with the helper's socket, to make a helper. Answered by a Forked."""


class Load(msgspec.Struct, frozen=True, tag=True):
    """Asks the zygote to load the tokenizer, unless it has done so. It takes a second or more, and
    many servers never need it."""


class Kill(msgspec.Struct, frozen=True, tag=True):
    """Asks the zygote to kill a helper. Answered by an Ended, as every end of a helper."""

    pid: int


Command = Fork | Load | Kill


class Forked(msgspec.Struct, frozen=True, tag=True):
    pid: int


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A helper has ended."""

    pid: int
    status: int
    """Exit status; a signal as a negative number."""


class NeedsTokenizer(msgspec.Struct, frozen=True, tag=True):
    """The job has to be done by a helper that has the tokenizer."""


class CompileDone(msgspec.Struct, frozen=True, tag=True):
    compiled: Compiled
    num_bytes: int
    """Its memory."""
    schemas: KeptSchemas
    """What was found of the schemas in its tags."""


class AdviseDone(msgspec.Struct, frozen=True, tag=True):
    advice: Advice


class ValidateDone(msgspec.Struct, frozen=True, tag=True):
    """The errors of a text; none if it is valid."""

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
    """Any other failure: a mistake in radixrt or a library; also why a helper can't start."""

    reason: str


Reply = (
    Ready
    | Forked
    | Ended
    | CompileDone
    | AdviseDone
    | ValidateDone
    | NeedsTokenizer
    | Refused
    | OutOfMemory
    | Failed
)

encode = msgspec.msgpack.Encoder().encode
decode_job = msgspec.msgpack.Decoder(Job).decode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_reply = msgspec.msgpack.Decoder(Reply).decode
decode_config = msgspec.msgpack.Decoder(PoolConfig).decode


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
