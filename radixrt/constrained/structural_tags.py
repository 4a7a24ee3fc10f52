"""Reads structural tags in xgrammar's form or in the older one, as a JSON object or its text.

{"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<f="], "tags": [...]}}
{"type": "structural_tag", "structures": [{"begin": ..., "schema": ..., "end": ...}], "triggers":
[]}
"""

import itertools
import json
from collections.abc import Callable
from typing import Any

import msgspec

from radixrt.base.errors import shown, wrong
from radixrt.constrained import fields, requests
from radixrt.constrained.constraint import (
    AnyText,
    Choice,
    Constraint,
    Either,
    Format,
    Parameters,
    Repeated,
    Series,
    StructuralTag,
    Tag,
    Tokens,
    is_endless,
)

MAX_TAGS = 1024
MAX_TRIGGERS = 64
MAX_REPEATS = 10_000
MAX_TOKENS = (1 << 31) - 1
MAX_NESTING = 100
"""Levels of lists and objects, schemas apart. Formats are read and compiled by recursion."""

_SCHEMAS = ("json_schema", "schema")
"""Keys whose values have limits of their own."""


def structural_tag(value: Any, param: str) -> Constraint:
    """The constraint of an object or its JSON text. Raises RequestError if it is of neither form,
    or uses an unsupported key; names the place.

    Args:
        param: name of the field, for errors.
    """
    if isinstance(value, str):
        value = requests.parse_json(value, param)
    given = fields.as_object(value, param)
    if given.get("type", "structural_tag") != "structural_tag":
        raise wrong(f"{param}.type", 'must be "structural_tag"')
    _check_nesting(given, param)
    if "format" in given:
        fields.refuse_others(given, {"type", "format"}, param)
        return _format(given["format"], f"{param}.format")
    if "structures" in given:
        return _older_form(given, param)
    raise wrong(param, "needs a format, or structures and triggers")


def _check_nesting(given: fields.Object, param: str) -> None:
    level: list[Any] = [given]
    for _ in range(MAX_NESTING):
        level = [inner for each in level for inner in _inner(each)]
        if not level:
            return
    raise wrong(param, f"is nested more than {MAX_NESTING} deep, the schemas in it apart")


def _inner(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [inner for name, inner in value.items() if name not in _SCHEMAS]
    return value if isinstance(value, list) else []


def check_triggers(tag: StructuralTag, param: str) -> StructuralTag:
    """Return the tag. Raises RequestError if a tag does not begin with exactly one trigger, or a
    trigger begins no tag."""
    for name, entries, most in (
        ("tags", tag.tags, MAX_TAGS),
        ("triggers", tag.triggers, MAX_TRIGGERS),
    ):
        if len(entries) > most:
            raise wrong(param, f"has {len(entries)} {name}; at most {most} are taken")
    for index, one in enumerate(tag.tags):
        fitting = [trigger for trigger in tag.triggers if one.begin.startswith(trigger)]
        if len(fitting) != 1:
            problem = f"begins with {len(fitting)} of the triggers, and must begin with exactly one"
            raise wrong(f"{param}.tags[{index}].begin", problem)
    for index, trigger in enumerate(tag.triggers):
        if not any(one.begin.startswith(trigger) for one in tag.tags):
            raise wrong(f"{param}.triggers[{index}]", "is not the beginning of any tag")
    return tag


def _older_form(given: fields.Object, param: str) -> StructuralTag:
    fields.refuse_others(given, {"type", "structures", "triggers"}, param)
    tags = []
    for item, where in fields.entries(given, "structures", param):
        structure = fields.as_object(item, where)
        fields.refuse_others(structure, {"begin", "schema", "end"}, where)
        tags.append(
            Tag(
                begin=fields.text(structure, "begin", where),
                content=requests.json_schema(structure.get("schema"), f"{where}.schema"),
                end=fields.text(structure, "end", where, may_be_empty=True),
            )
        )
    triggers = fields.as_texts(given.get("triggers"), f"{param}.triggers")
    return check_triggers(StructuralTag(tags=tuple(tags), triggers=triggers), param)


def _format(value: Any, where: str) -> Constraint:
    """The format of a whole answer."""
    found = _part(value, where)
    if isinstance(found, AnyText):
        if found == AnyText():
            raise wrong(where, "lets any text through; leave it out")
        return Series(elements=(found,))
    return found


def _part(value: Any, where: str) -> Format:
    """The format of a part of an answer."""
    given = fields.as_object(value, where)
    kind = given.get("type")
    if not isinstance(kind, str) or kind not in _FORMATS:
        raise wrong(f"{where}.type", f"must be one of {', '.join(_FORMATS)}, not {shown(kind)}")
    keys, read = _FORMATS[kind]
    fields.refuse_others(given, {"type", *keys}, where)
    return read(given, where)


# ---------------------------------------------------------------- tags


def _triggered_tags(given: fields.Object, where: str) -> StructuralTag:
    least, most = _counts(given, where)
    tag = StructuralTag(
        tags=_tags(given, where),
        triggers=fields.as_texts(given.get("triggers"), f"{where}.triggers"),
        min_tags=least,
        max_tags=most,
        excludes=_excludes(given, where),
    )
    return check_triggers(tag, where)


def _dispatch(given: fields.Object, where: str) -> StructuralTag:
    """Triggered tags whose beginnings are the triggers, without ends."""
    tags = []
    for rule, place in fields.entries(given, "rules", where):
        pattern, content = _rule(rule, place)
        if not isinstance(pattern, str) or not pattern:
            raise wrong(f"{place}[0]", "must be a string and not be empty")
        tags.append(Tag(begin=pattern, content=content, end=""))
    return check_triggers(
        StructuralTag(
            tags=tuple(tags),
            triggers=tuple(dict.fromkeys(tag.begin for tag in tags)),
            max_tags=None if fields.flag(given, "loop", where, True) else 1,
            excludes=_excludes(given, where),
        ),
        where,
    )


def _tags_with_separator(given: fields.Object, where: str) -> StructuralTag:
    tags = _tags(given, where)
    least, most = _counts(given, where)
    return StructuralTag(
        tags=tags,
        triggers=_shortest_prefixes([tag.begin for tag in tags]),
        free_text=False,
        separator=fields.text(given, "separator", where, may_be_empty=True),
        min_tags=least,
        max_tags=most,
    )


def _shortest_prefixes(begins: list[str]) -> tuple[str, ...]:
    """Each text has exactly one of these as its beginning."""
    chosen: list[str] = []
    for begin in sorted(begins):  # a prefix of another text comes before it
        if not (chosen and begin.startswith(chosen[-1])):
            chosen.append(begin)
    return tuple(chosen)


def _counts(given: fields.Object, where: str) -> tuple[int, int | None]:
    """Least and most tags."""
    least = int(fields.flag(given, "at_least_one", where))
    return least, 1 if fields.flag(given, "stop_after_first", where) else None


def _tags(given: fields.Object, where: str) -> tuple[Tag, ...]:
    return tuple(_tag(item, place) for item, place in fields.entries(given, "tags", where))


def _tag(value: Any, where: str) -> Tag:
    given = _checked_tag(value, where)
    content = _content(given.get("content"), f"{where}.content")
    ends = given.get("end")
    if isinstance(ends, list):
        first, *others = fields.as_texts(ends, f"{where}.end")
    else:
        first, others = fields.text(given, "end", where, may_be_empty=not is_endless(content)), []
    return Tag(
        begin=fields.text(given, "begin", where),
        content=content,
        end=first,
        other_ends=tuple(others),
    )


def _checked_tag(value: Any, where: str) -> fields.Object:
    given = fields.as_object(value, where)
    fields.refuse_others(given, {"type", "begin", "content", "end"}, where)
    if given.get("type", "tag") != "tag":
        raise wrong(f"{where}.type", 'must be "tag"')
    return given


def _tag_alone(given: fields.Object, where: str) -> Format:
    if isinstance(given.get("begin"), dict) or isinstance(given.get("end"), dict):
        return _between_tokens(given, where)
    tag = _tag(given, where)
    return StructuralTag(
        tags=(tag,), triggers=(tag.begin,), free_text=False, min_tags=1, max_tags=1
    )


def _between_tokens(given: fields.Object, where: str) -> Series:
    """A tag that begins or ends with a token."""
    content = _part(given.get("content"), f"{where}.content")
    marks: list[Format] = []
    for name in ("begin", "end"):
        if isinstance(given.get(name), dict):
            token = fields.as_object(given[name], f"{where}.{name}")
            if token.get("type", "token") != "token":
                raise wrong(f"{where}.{name}.type", 'must be "token"')
            fields.refuse_others(token, {"type", "token"}, f"{where}.{name}")
            marks.append(_token(token, f"{where}.{name}"))
        else:
            text = fields.text(
                given, name, where, may_be_empty=name == "end" and not is_endless(content)
            )
            marks.append(Choice(options=(text,)))
    begin, end = marks
    if is_endless(content) and not isinstance(end, Tokens):
        raise wrong(f"{where}.end", "must be a token, as the beginning is")
    return Series(elements=(begin, content, end))


def _content(value: Any, where: str) -> Format | Parameters:
    """The content of a tag, which may be parameters that are written one by one."""
    given = fields.as_object(value, where)
    kind, style = given.get("type"), given.get("style")
    if kind != "qwen_xml_parameter" and (kind, style) != ("json_schema", "qwen_xml"):
        return _part(value, where)
    fields.refuse_others(given, {"type", "json_schema", "style"}, where)
    schema = requests.json_schema(given.get("json_schema"), f"{where}.json_schema")
    loaded = json.loads(schema.schema)
    if not isinstance(loaded, dict) or loaded.get("type", "object") != "object":
        raise wrong(f"{where}.json_schema", 'must be a schema of type "object"')
    return Parameters(schema=schema, style="qwen_xml")


# ---------------------------------------------------------------- formats of formats


def _sequence(given: fields.Object, where: str) -> Format:
    elements = _parts(given, where)
    for index, (each, following) in enumerate(itertools.pairwise(elements)):
        if is_endless(each) and not (isinstance(each, AnyText) and isinstance(following, Tokens)):
            problem = "has no end of its own; put it last, or make it the content of a tag"
            raise wrong(f"{where}.elements[{index}]", problem)
    return elements[0] if len(elements) == 1 else Series(elements=elements)


def _or(given: fields.Object, where: str) -> Format:
    elements = _parts(given, where)
    if len({is_endless(each) for each in elements}) > 1:
        problem = "must all be free text, or none of them: a free text could be any of the others"
        raise wrong(f"{where}.elements", problem)
    return elements[0] if len(elements) == 1 else Either(elements=elements)


def _parts(given: fields.Object, where: str) -> tuple[Format, ...]:
    return tuple(_part(item, place) for item, place in fields.entries(given, "elements", where))


def _repeated(least: int, most: int | None) -> Callable[[fields.Object, str], Format]:
    return lambda given, where: _times(given, where, least, most)


def _repeat(given: fields.Object, where: str) -> Format:
    least, most = given.get("min"), given.get("max")
    for name, value, lowest in (("min", least, 0), ("max", most, -1)):
        if type(value) is not int or not lowest <= value <= MAX_REPEATS:
            raise wrong(f"{where}.{name}", f"must be an integer from {lowest} to {MAX_REPEATS}")
    assert isinstance(least, int) and isinstance(most, int)
    if -1 < most < max(least, 1):
        raise wrong(f"{where}.max", "must be -1, or at least 1 and min")
    return _times(given, where, least, None if most == -1 else most)


def _times(given: fields.Object, where: str, least: int, most: int | None) -> Format:
    content = _part(given.get("content"), f"{where}.content")
    if is_endless(content):
        raise wrong(f"{where}.content", "has no end of its own; make it the content of a tag")
    return Repeated(content=content, least=least, most=most)


# ---------------------------------------------------------------- tokens


def _token(given: fields.Object, where: str) -> Tokens:
    return Tokens(tokens=_token_list([given.get("token")], f"{where}.token"))


def _other_token(given: fields.Object, where: str) -> Tokens:
    return Tokens(tokens=_excluded_tokens(given, where), excluded=True)


def _any_text(given: fields.Object, where: str) -> AnyText:
    excludes, most = _excludes(given, where), _max_tokens(given, where)
    if excludes and most is not None:
        raise wrong(f"{where}.max_tokens", "can't go with excludes")
    return AnyText(excludes=excludes, max_tokens=most)


def _max_tokens(given: fields.Object, where: str) -> int | None:
    most = given.get("max_tokens")
    if most is not None and (type(most) is not int or not 0 <= most <= MAX_TOKENS):
        raise wrong(f"{where}.max_tokens", f"must be an integer from 0 to {MAX_TOKENS}")
    return most


def _token_triggered_tags(given: fields.Object, where: str) -> Series:
    triggers = _token_list(given.get("trigger_tokens"), f"{where}.trigger_tokens")
    tags: list[Format] = []
    for item, place in fields.entries(given, "tags", where):
        tag = _checked_tag(item, place)
        begin = fields.as_object(tag.get("begin"), f"{place}.begin").get("token")
        if begin not in triggers:
            raise wrong(f"{place}.begin.token", "must be one of the trigger_tokens")
        tags.append(_between_tokens(tag, place))
    return _tags_at_tokens(given, where, triggers, tags, *_counts(given, where))


def _token_dispatch(given: fields.Object, where: str) -> Series:
    tags: list[Format] = []
    triggers: list[int | str] = []
    for rule, place in fields.entries(given, "rules", where):
        token, content = _rule(rule, place)
        triggers += _token_list([token], f"{place}[0]")
        if is_endless(content):
            raise wrong(f"{place}[1]", "has no end of its own; make it the content of a tag")
        tags.append(Series(elements=(Tokens(tokens=(triggers[-1],)), content)))
    most = None if fields.flag(given, "loop", where, True) else 1
    return _tags_at_tokens(given, where, tuple(triggers), tags, 0, most)


def _tags_at_tokens(
    given: fields.Object,
    where: str,
    triggers: tuple[int | str, ...],
    tags: list[Format],
    least: int,
    most: int | None,
) -> Series:
    """Free tokens with tags between them, each of which begins with a token that is not free."""
    apart = dict.fromkeys((*triggers, *_excluded_tokens(given, where)))
    free = Repeated(content=Tokens(tokens=tuple(apart), excluded=True), least=0, most=None)
    tag = tags[0] if len(tags) == 1 else Either(elements=tuple(tags))
    held = Repeated(content=Series(elements=(free, tag)), least=least, most=most)
    return Series(elements=(held, free))


def _excluded_tokens(given: fields.Object, where: str) -> tuple[int | str, ...]:
    excluded = given.get("exclude_tokens") or []
    return _token_list(excluded, f"{where}.exclude_tokens") if excluded else ()


def _token_list(value: Any, where: str) -> tuple[int | str, ...]:
    tokens = fields.as_list(value, where)
    for token in tokens:
        if type(token) not in (int, str) or token == "":
            raise wrong(where, "must hold ids of tokens, or their texts")
        if isinstance(token, int) and not 0 <= token < 1 << 31:
            raise wrong(where, f"holds {token}, which is the id of no token")
    return tuple(dict.fromkeys(tokens))


# ---------------------------------------------------------------- texts and JSON


def _json_schema(given: fields.Object, where: str) -> Format:
    if given.get("style", "json") != "json":
        problem = (
            'must be "json", or "qwen_xml" in the content of a tag; other styles are not supported'
        )
        raise wrong(f"{where}.style", problem)
    found = requests.json_schema(given.get("json_schema"), f"{where}.json_schema")
    any_order = fields.flag(given, "any_order", where) or found.any_order
    return msgspec.structs.replace(found, any_order=any_order)


_FORMATS: dict[str, tuple[tuple[str, ...], Callable[[fields.Object, str], Format]]] = {
    "json_schema": (("json_schema", "style", "any_order"), _json_schema),
    "regex": (("pattern",), lambda g, where: requests.regex(g.get("pattern"), f"{where}.pattern")),
    "grammar": (("grammar",), lambda g, where: requests.grammar(g.get("grammar"), f"{where}.grammar")),
    "const_string": (("value",), lambda g, where: Choice(options=(fields.text(g, "value", where),))),
    "any_text": (("excludes", "max_tokens"), _any_text),
    "tag": (("begin", "content", "end"), _tag_alone),
    "triggered_tags": (("triggers", "tags", "at_least_one", "stop_after_first", "excludes"), _triggered_tags),
    "tags_with_separator": (("tags", "separator", "at_least_one", "stop_after_first"), _tags_with_separator),
    "dispatch": (("rules", "loop", "excludes"), _dispatch),
    "sequence": (("elements",), _sequence),
    "or": (("elements",), _or),
    "optional": (("content",), _repeated(0, 1)),
    "star": (("content",), _repeated(0, None)),
    "plus": (("content",), _repeated(1, None)),
    "repeat": (("content", "min", "max"), _repeat),
    "token": (("token",), _token),
    "exclude_token": (("exclude_tokens",), _other_token),
    "any_tokens": (("exclude_tokens", "max_tokens"), lambda g, where: Repeated(content=_other_token(g, where), least=0, most=_max_tokens(g, where))),
    "token_triggered_tags": (("trigger_tokens", "tags", "exclude_tokens", "at_least_one", "stop_after_first"), _token_triggered_tags),
    "token_dispatch": (("rules", "loop", "exclude_tokens"), _token_dispatch),
}  # fmt: skip
"""The other keys of each type, and the function that makes a constraint of it."""


def _rule(value: Any, where: str) -> tuple[Any, Format]:
    """The beginning of a format in a dispatch, and the format."""
    if not isinstance(value, list) or len(value) != 2:
        raise wrong(where, "must be a list of a pattern and a format")
    return value[0], _part(value[1], f"{where}[1]")


def _excludes(given: fields.Object, where: str) -> tuple[str, ...]:
    excluded = given.get("excludes") or []
    return fields.as_texts(excluded, f"{where}.excludes") if excluded else ()
