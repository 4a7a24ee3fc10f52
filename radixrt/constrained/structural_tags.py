"""Reads structural tags in xgrammar's form or in the older one, as a JSON object or its text.

{"type": "structural_tag", "format": {"type": "triggered_tags", "triggers": ["<f="], "tags": [...]}}
{"type": "structural_tag", "structures": [{"begin": ..., "schema": ..., "end": ...}], "triggers": [...]}
"""

import re
from collections.abc import Callable
from typing import Any

from radixrt.base.errors import RequestError, shown
from radixrt.constrained import requests
from radixrt.constrained.constraint import AnyText, Choice, Constraint, Content, StructuralTag, Tag

_Object = dict[str, Any]

MAX_TAGS = 1024
MAX_TRIGGERS = 64


def structural_tag(value: Any, param: str) -> Constraint:
    """
    Args:
        value: an object or its JSON text.
        param: name of the field, for errors.

    Raises:
        RequestError: it is of neither form, or uses an unsupported feature; names the place.
    """
    if isinstance(value, str):
        value = requests.parse_json(value, param)
    given = _object(value, param)
    if given.get("type", "structural_tag") != "structural_tag":
        raise _wrong(f"{param}.type", 'must be "structural_tag"')
    if "format" in given:
        _refuse_other_keys(given, {"type", "format"}, param)
        return _format(given["format"], f"{param}.format")
    if "structures" in given:
        return _older_form(given, param)
    raise _wrong(param, "needs a format, or structures and triggers")


def check_triggers(tag: StructuralTag, param: str) -> StructuralTag:
    """Return the tag.

    Raises:
        RequestError: a tag does not begin with exactly one trigger, or a trigger begins no tag.
    """
    for name, entries, most in (
        ("tags", tag.tags, MAX_TAGS),
        ("triggers", tag.triggers, MAX_TRIGGERS),
    ):
        if len(entries) > most:
            raise _wrong(param, f"has {len(entries)} {name}; at most {most} are taken")
    for index, one in enumerate(tag.tags):
        fitting = [trigger for trigger in tag.triggers if one.begin.startswith(trigger)]
        if len(fitting) != 1:
            problem = f"begins with {len(fitting)} of the triggers, and must begin with exactly one"
            raise _wrong(f"{param}.tags[{index}].begin", problem)
    for index, trigger in enumerate(tag.triggers):
        if not any(one.begin.startswith(trigger) for one in tag.tags):
            raise _wrong(f"{param}.triggers[{index}]", "is not the beginning of any tag")
    return tag


def _older_form(given: _Object, param: str) -> StructuralTag:
    _refuse_other_keys(given, {"type", "structures", "triggers"}, param)
    tags = []
    for index, item in enumerate(_list(given["structures"], f"{param}.structures")):
        where = f"{param}.structures[{index}]"
        structure = _object(item, where)
        _refuse_other_keys(structure, {"begin", "schema", "end"}, where)
        tags.append(
            Tag(
                begin=_text(structure, "begin", where),
                content=requests.json_schema(structure.get("schema"), f"{where}.schema"),
                end=_text(structure, "end", where, may_be_empty=True),
            )
        )
    triggers = _texts(given.get("triggers"), f"{param}.triggers")
    return check_triggers(StructuralTag(tags=tuple(tags), triggers=triggers), param)


def _format(value: Any, where: str) -> Constraint:
    """The format of a whole answer."""
    given = _object(value, where)
    kind = given.get("type")
    if kind == "triggered_tags":
        return _triggered_tags(given, where)
    if kind == "tags_with_separator":
        return _tags_with_separator(given, where)
    if kind == "tag":
        tag = _tag(given, where)
        return StructuralTag(
            tags=(tag,), triggers=(tag.begin,), free_text=False, min_tags=1, max_tags=1
        )
    content = _content(given, where, ("triggered_tags", "tags_with_separator", "tag"))
    if isinstance(content, AnyText):
        raise _wrong(where, "lets any text through; leave it out")
    return content


def _triggered_tags(given: _Object, where: str) -> StructuralTag:
    known = {"type", "triggers", "tags", "at_least_one", "stop_after_first", "excludes"}
    _refuse_other_keys(given, known, where)
    if given.get("excludes"):
        raise _wrong(f"{where}.excludes", "is not supported; leave it out")
    least, most = _counts(given, where)
    tag = StructuralTag(
        tags=_tags(given, where),
        triggers=_texts(given.get("triggers"), f"{where}.triggers"),
        min_tags=least,
        max_tags=most,
    )
    return check_triggers(tag, where)


def _tags_with_separator(given: _Object, where: str) -> StructuralTag:
    known = {"type", "tags", "separator", "at_least_one", "stop_after_first"}
    _refuse_other_keys(given, known, where)
    tags = _tags(given, where)
    least, most = _counts(given, where)
    return StructuralTag(
        tags=tags,
        triggers=_shortest_prefixes([tag.begin for tag in tags]),
        free_text=False,
        separator=_text(given, "separator", where, may_be_empty=True),
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


def _counts(given: _Object, where: str) -> tuple[int, int | None]:
    """Least and most tags."""
    for name in ("at_least_one", "stop_after_first"):
        if not isinstance(given.get(name, False), bool):
            raise _wrong(f"{where}.{name}", "must be a boolean")
    return int(given.get("at_least_one", False)), 1 if given.get("stop_after_first") else None


def _tags(given: _Object, where: str) -> tuple[Tag, ...]:
    items = _list(given.get("tags"), f"{where}.tags")
    return tuple(_tag(item, f"{where}.tags[{index}]") for index, item in enumerate(items))


def _tag(value: Any, where: str) -> Tag:
    given = _object(value, where)
    _refuse_other_keys(given, {"type", "begin", "content", "end"}, where)
    if given.get("type", "tag") != "tag":
        raise _wrong(f"{where}.type", 'must be "tag"')
    content = _content(_object(given.get("content"), f"{where}.content"), f"{where}.content")
    end = _text(given, "end", where, may_be_empty=not isinstance(content, AnyText))
    return Tag(begin=_text(given, "begin", where), content=content, end=end)


def _content(given: _Object, where: str, also: tuple[str, ...] = ()) -> Content:
    """``also``: other values that are allowed here, for the error."""
    kind = given.get("type")
    if not isinstance(kind, str) or kind not in _CONTENTS:
        known = ", ".join([*also, *_CONTENTS])
        raise _wrong(f"{where}.type", f"must be one of {known} here, not {shown(kind)}")
    keys, read = _CONTENTS[kind]
    _refuse_other_keys(given, {"type", *keys}, where)
    return read(given, where)


def _json_schema(given: _Object, where: str) -> Content:
    if given.get("style", "json") != "json":
        raise _wrong(f"{where}.style", 'must be "json"; other ways of writing are not supported')
    return requests.json_schema(given.get("json_schema"), f"{where}.json_schema")


_CONTENTS: dict[str, tuple[tuple[str, ...], Callable[[_Object, str], Content]]] = {
    "json_schema": (("json_schema", "style"), _json_schema),
    "regex": (("pattern",), lambda g, where: requests.regex(g.get("pattern"), f"{where}.pattern")),
    "grammar": (("grammar",), lambda g, where: requests.grammar(g.get("grammar"), f"{where}.grammar")),
    "const_string": (("value",), lambda g, where: Choice(options=(_text(g, "value", where),))),
    "any_text": ((), lambda _, where: AnyText()),
}  # fmt: skip
"""By type: its other keys, and the function that makes a constraint of it."""


def _object(value: Any, where: str) -> _Object:
    if not isinstance(value, dict):
        raise _wrong(where, "must be an object")
    return value


def _list(value: Any, where: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise _wrong(where, "must be a list with at least one entry")
    return value


def _texts(value: Any, where: str) -> tuple[str, ...]:
    texts = _list(value, where)
    if not all(isinstance(text, str) and text for text in texts):
        raise _wrong(where, "must hold strings, none of them empty")
    return tuple(dict.fromkeys(texts))


def _text(given: _Object, name: str, where: str, may_be_empty: bool = False) -> str:
    text = given.get(name)
    if not isinstance(text, str) or not (text or may_be_empty):
        filled = "" if may_be_empty else " and not be empty"
        raise _wrong(f"{where}.{name}", f"must be a string{filled}")
    return text


def _refuse_other_keys(given: _Object, known: set[str], where: str) -> None:
    """Refuse unknown keys: they would have to be ignored."""
    for name in given.keys() - known:
        shown = name if re.fullmatch(r"\w{1,50}", name) else repr(name[:50])
        raise _wrong(f"{where}.{shown}", "is not supported; leave it out")


def _wrong(where: str, problem: str) -> RequestError:
    return RequestError(f"{where} {problem}.", param=where)
