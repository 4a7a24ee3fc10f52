"""Checks that it is certain where the tags of a structural tag begin, and which of them it is."""

import itertools

from radixrt.constrained.constraint import AnyJson, JsonSchema, Parameters, StructuralTag, Tag
from radixrt.constrained.errors import CannotCompile
from radixrt.constrained.parameters import STYLES
from radixrt.constrained.tool_calls import begins_json

MAX_TAGS = 4096


def check_triggers(constraint: StructuralTag) -> None:
    """Raises:
    CannotCompile: it isn't certain which tag a trigger begins, or how many tags there may be.
    """
    if not constraint.tags or len(constraint.tags) > MAX_TAGS:
        raise CannotCompile(
            f"There are {len(constraint.tags)} tags; give between 1 and {MAX_TAGS}."
        )
    most = constraint.max_tags
    if constraint.min_tags < 0 or (most is not None and most < max(constraint.min_tags, 1)):
        raise CannotCompile(f"From {constraint.min_tags} to {most} tags are no number of tags.")
    begins = sorted(
        {_certain(tag) for tag in constraint.tags if not _is_told_from_others(tag, constraint)}
    )
    for begin, following in itertools.pairwise(begins):
        if following.startswith(begin):
            raise CannotCompile(
                f"The tag {begin!r} begins like {following!r}, so a text may be either. Change one, so that neither begins with the other."
            )
    if not constraint.free_text or constraint.lists:
        return
    for trigger in constraint.triggers:
        if not trigger or not any(tag.begin.startswith(trigger) for tag in constraint.tags):
            raise CannotCompile(f"The trigger {trigger!r} is not how any tag begins.")
    for tag in constraint.tags:
        if (count := sum(map(tag.begin.startswith, constraint.triggers))) != 1:
            raise CannotCompile(
                f"The tag that begins with {tag.begin!r} must begin with one trigger, and does with {count}."
            )


def _certain(tag: Tag) -> str:
    """The text with which every occurrence of a tag begins."""
    if not isinstance(tag.content, Parameters):
        return tag.begin
    next_marks = zip(STYLES[tag.content.style].opening[0], tag.end, strict=False)
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], next_marks)
    return tag.begin + "".join(character for character, _ in same)


def _is_told_from_others(tag: Tag, constraint: StructuralTag) -> bool:
    """Whether the tag is JSON with an empty ``begin``, and every other tag begins as no JSON does."""
    if tag.begin or constraint.free_text or not isinstance(tag.content, JsonSchema | AnyJson):
        return False
    openings = [opening for opening, _ in constraint.lists] or [""]
    others = [one.begin for one in constraint.tags if one is not tag]
    return not any(
        begins_json(opening + begin, tag.content) for opening in openings for begin in others
    )
