"""How is one of several texts asked for in OpenAI's API, which has JSON schemas alone? As the one property of an object.

An object, since strict mode takes no other JSON at the root. The program never sees it: the text behind the call is the choice.
"""

import dataclasses

import msgspec

from radixrt.lang.backends.protocol import Call, Piece
from radixrt.lang.constraints import Choices, JsonSchema

PROPERTY = "choice"


def with_schema(call: Call, choices: Choices) -> Call:
    """The same call, held to an object that holds a choice. It comes whole: there is no text in half an object."""
    schema = {
        "type": "object",
        "properties": {PROPERTY: {"type": "string", "enum": list(choices.texts)}},
        "required": [PROPERTY],
        "additionalProperties": False,
    }
    return dataclasses.replace(call, constraint=JsonSchema(schema, PROPERTY), stream=False)


def without_object(piece: Piece) -> Piece:
    """A whole answer with the choice as its text. What is no such object, such as one that was cut off, stays as it is."""
    try:
        return dataclasses.replace(piece, text=msgspec.json.decode(piece.text)[PROPERTY])
    except (msgspec.DecodeError, KeyError, TypeError):
        return piece
