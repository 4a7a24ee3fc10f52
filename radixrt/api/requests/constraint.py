"""Reads the constraint of a request, from the fields of OpenAI and of other servers that can hold
one."""

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec

from radixrt.api.requests.protocol import GenerationFields, StructuredOutputs
from radixrt.base.config import ServerConfig
from radixrt.base.errors import RequestError, shown, wrong
from radixrt.constrained import requests
from radixrt.constrained.constraint import AnyJson, Constraint, JsonSchema, StructuralTag
from radixrt.constrained.structural_tags import structural_tag


class AskedConstraint(NamedTuple):
    """The constraint that a request asks for."""

    constraint: Constraint | None
    field: str = ""
    """The request's field that holds it, which errors name."""


def asked_constraint(
    fields: msgspec.Struct, config: ServerConfig, prefix: str = ""
) -> AskedConstraint:
    """Read the constraint of a request.

    Args:
        fields: a struct with some of the fields of
            :class:`radixrt.api.requests.protocol.ConstraintFields`.
        prefix: goes before their names in errors.

    Raises:
        RequestError: there are several constraints, or one is not well formed.
    """
    asked = _read(_READERS, fields, prefix)
    structured_outputs = getattr(fields, "structured_outputs", None)
    if structured_outputs is not None:
        asked += _structured_outputs(structured_outputs, f"{prefix}structured_outputs", config)
    _check_backend(getattr(fields, "guided_decoding_backend", None), config)
    _check_whitespace(
        getattr(fields, "guided_whitespace_pattern", None), "guided_whitespace_pattern", config
    )
    constraint = requests.only_one(asked)
    constraint = _in_order(constraint, getattr(fields, "property_order", None), prefix)
    return AskedConstraint(constraint, asked[0][0].partition(".")[0] if asked else "")


def streams_values(fields: GenerationFields, constraint: Constraint | None) -> bool:
    """Whether the stream tells of each value of its JSON.

    Raises:
        RequestError: the response is not a stream, or its answer need not be JSON.
    """
    if not fields.stream_values:
        return False
    if not fields.stream:
        raise wrong("stream_values", "needs stream to be true")
    if not isinstance(constraint, JsonSchema | AnyJson | StructuralTag):
        raise wrong(
            "stream_values",
            "needs an answer that is JSON: ask for a JSON schema or json_object, or give tools",
        )
    return True


def _read(
    readers: "dict[str, Reader]", fields: msgspec.Struct, prefix: str
) -> list[tuple[str, Constraint]]:
    """The constraints of all these fields that hold one, each with the name that errors give it."""
    asked = []
    for name, read in readers.items():
        value = getattr(fields, name, None)
        if value is not None and (constraint := read(value, prefix + name)) is not None:
            asked.append((prefix + name, constraint))
    return asked


# ---------------------------------------------------------------- one field each


def _response_format(value: dict[str, Any], param: str) -> Constraint | None:
    kind = value.get("type")
    if kind == "structural_tag":
        return structural_tag(value, param)
    if kind == "json_schema":
        _refuse_other_keys(value, {"type", "json_schema"}, param)
        return _openai_schema(value.get("json_schema"), f"{param}.json_schema")
    if kind not in ("text", "json_object"):
        raise wrong(
            f"{param}.type",
            f"must be text, json_object, json_schema or structural_tag, not {shown(kind)}",
        )
    _refuse_other_keys(value, {"type"}, param)
    return requests.any_json() if kind == "json_object" else None


def _openai_schema(value: Any, param: str) -> JsonSchema:
    """``{"name": ..., "schema": ..., "strict": ...}``."""
    if not isinstance(value, dict):
        raise wrong(param, "must be an object with a schema")
    _refuse_other_keys(value, {"name", "description", "schema", "strict"}, param)
    if "schema" not in value:
        raise wrong(
            f"{param}.schema", 'is missing; for JSON of any form, ask for the type "json_object"'
        )
    strict = value.get("strict")
    if not isinstance(strict, bool | None):
        raise wrong(f"{param}.strict", "must be a boolean")
    return requests.json_schema(value["schema"], f"{param}.schema", strict is not False)


def _in_order(constraint: Constraint | None, order: str | None, prefix: str) -> Constraint | None:
    """The constraint with the request's order of properties; it wins over the schema's own."""
    if order is None:
        return constraint
    name = f"{prefix}property_order"
    any_order = requests.takes_any_order(order, name)
    if not isinstance(constraint, JsonSchema):
        raise wrong(name, "goes with a JSON schema, and there is none")
    return msgspec.structs.replace(constraint, any_order=any_order)


Reader = Callable[[Any, str], Constraint | None]
"""Makes a constraint of a field's value; None: no constraint. The second argument is the field's
name in errors."""

_READERS: dict[str, Reader] = {
    "response_format": _response_format,
    "guided_json": requests.json_schema,
    "guided_regex": requests.regex,
    "guided_choice": requests.choice,
    "guided_grammar": requests.grammar,
    "json_schema": requests.json_schema,
    "regex": requests.regex,
    "ebnf": requests.ebnf,
    "grammar": lambda text, param: requests.ebnf(text, param) if text else None,
    "structural_tag": structural_tag,
}
"""The reader of each field."""


def _structured_outputs(
    value: StructuredOutputs, param: str, config: ServerConfig
) -> list[tuple[str, Constraint]]:
    if value.disable_additional_properties:
        raise RequestError(
            f'{param}.disable_additional_properties is not supported; write "additionalProperties": false into '
            "the schema.",
            param=f"{param}.disable_additional_properties",
        )
    if value.disable_any_whitespace and config.grammar_whitespace != "compact":
        raise wrong(
            f"{param}.disable_any_whitespace",
            "is not supported by this server; start it with --grammar-whitespace compact",
        )
    _check_whitespace(value.whitespace_pattern, f"{param}.whitespace_pattern", config)
    return _read(_OUTPUT_READERS, value, f"{param}.")


_OUTPUT_READERS: dict[str, Reader] = {
    "json": requests.json_schema,
    "regex": requests.regex,
    "choice": requests.choice,
    "grammar": requests.grammar,
    "json_object": lambda asked, _: requests.any_json() if asked else None,
    "structural_tag": structural_tag,
}
"""The reader of each field of :class:`StructuredOutputs`."""

_LIBRARIES = {"guidance": "llguidance", "outlines": "fsm", "xgrammar": "auto"}
"""vLLM's names of backends, where they differ from ours; what xgrammar takes is enforced by the
others."""


def _check_backend(name: str | None, config: ServerConfig) -> None:
    if name is None:
        return
    wanted = name.partition(":")[0]
    wanted = _LIBRARIES.get(wanted, wanted)
    if wanted not in ("auto", config.grammar_backend):
        raise wrong(
            "guided_decoding_backend",
            f"{shown(name)} can't be chosen by a request; this server has "
            f"{config.grammar_backend!r} (--grammar-backend). Leave it out",
        )


def _check_whitespace(pattern: str | None, param: str, config: ServerConfig) -> None:
    """An empty pattern allows no white space, like ``compact``."""
    if pattern is None or (pattern == "" and config.grammar_whitespace == "compact"):
        return
    raise wrong(
        param,
        f"can't be chosen by a request; this server's white space in JSON is "
        f"{config.grammar_whitespace!r} (--grammar-whitespace). Leave it out",
    )


def _refuse_other_keys(value: dict[str, Any], known: set[str], param: str) -> None:
    """Raises RequestError if the value has a key that would have to be ignored."""
    for name in value.keys() - known:
        raise RequestError(
            f"{param}: {shown(name)} is not supported; leave it out. There are {', '.join(sorted(known))}.",
            param=param,
        )
