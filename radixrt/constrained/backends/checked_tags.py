"""Says whether the contents of tags can be found in an answer, so that values in them can be checked, and how to find them."""

import json
import re
from collections.abc import Mapping

import msgspec

from radixrt.constrained.constraint import (
    AnyJson,
    AnyText,
    Constraint,
    JsonSchema,
    Parameters,
    StructuralTag,
    Tag,
)
from radixrt.constrained.grammar import CheckedParameters, CheckedTag, CheckedTags, SpanCheck
from radixrt.constrained.parameters import Form, any_parameter, declared_parameters, takes_any_name


def finds_content(constraint: Constraint, tag: Tag) -> bool:
    """Whether the content of one of the constraint's tags can be told from the text around it."""
    if not isinstance(constraint, StructuralTag):
        return False
    tags, separator = constraint.tags, constraint.separator
    findable = JsonSchema | AnyJson | AnyText | Parameters
    return (
        not any(
            end.startswith(separator + each.begin)
            for _, end in constraint.lists
            for each in tags
            if each.begin
        )
        and all(isinstance(each.content, findable) for each in tags)
        and not any(each.other_ends for each in tags)
        and len({each.begin for each in tags}) == len(tags)
        and not re.match(r"[-+.\w]", tag.end)
    )


def checked_tags(
    constraint: StructuralTag, checks: Mapping[int, tuple[SpanCheck, ...]]
) -> CheckedTags:
    """The tags for the search for their contents.

    Args:
        checks: by the position of the tag.
    """
    return CheckedTags(
        tags=(
            *(_tag(tag, checks.get(index, ())) for index, tag in enumerate(constraint.tags)),
            *(_tag(tag, ()) for tag in constraint.before),
        ),
        triggers=constraint.triggers,
        free_text=constraint.free_text,
        separator=constraint.separator,
        lists=constraint.lists,
        begins_answer=bool(constraint.not_text),
    )


def _tag(tag: Tag, checks: tuple[SpanCheck, ...]) -> CheckedTag:
    parameters = None
    if isinstance(tag.content, Parameters):
        schema, style = json.loads(tag.content.schema.schema), tag.content.style
        every = [any_parameter(schema)] if takes_any_name(schema) else declared_parameters(schema)
        texts = tuple(one.name for one in every if one.form is not Form.JSON)
        parameters = CheckedParameters(style=style, texts=texts, end=tag.end)
    return CheckedTag(
        begin=tag.begin,
        end="" if parameters else tag.end,
        is_json=isinstance(tag.content, JsonSchema | AnyJson | Parameters),
        checks=tuple(msgspec.structs.replace(check, tag=tag.begin) for check in checks),
        parameters=parameters,
    )
