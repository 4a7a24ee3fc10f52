"""What the processors of model families write in the place of an image: text around runs of
placeholders."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

Grid = tuple[int, int]
"""Rows and columns of an image: of its placeholders, where images have sizes of their own; else of
the tiles beside the one that shows all of it, (0, 0) if there is no other."""


class Family(NamedTuple):
    """The form of one family."""

    mark: str
    """Special token that the chat template writes for an image; "": the placeholder itself."""
    text_of: Callable[[str, Grid], str]
    """The text in the place of the mark, given a placeholder, which stands there once for each
    tile in the order of the tiles."""
    runs_of: Callable[[Grid], tuple[int, ...]] | None = None
    """Placeholders of each run, where images have sizes of their own: these are its tiles. None: a
    run is a tile of one size."""
    patch_is_unit: bool = False
    """The processor takes the pixels of a placeholder's side for those of a patch."""
    options: Mapping[str, Any] = MappingProxyType({})
    """Of the processor, beside its settings."""


def _all_in_one(grid: Grid) -> tuple[int, ...]:
    """All placeholders are neighbours."""
    rows, columns = grid
    return (rows * columns,)


def _by_rows(grid: Grid) -> tuple[int, ...]:
    """The placeholders of each row are a run."""
    rows, columns = grid
    return (columns,) * rows


def _rows(placeholder: str, grid: Grid) -> str:
    """Each row but the last ends with a break (Pixtral)."""
    rows, _ = grid
    return f"{placeholder}[IMG_BREAK]" * (rows - 1) + f"{placeholder}[IMG_END]"


def _one(placeholder: str, grid: Grid) -> str:
    """One tile without any text around it (LLaVA)."""
    return placeholder


def _tiled(placeholder: str, grid: Grid) -> str:
    """Tiles by rows, each with its place, and the whole image behind them (Idefics 3,
    SmolVLM)."""
    around, whole = "<fake_token_around_image>", "<global-img>"
    rows, columns = grid
    text = ""
    for row in range(1, rows + 1):
        for column in range(1, columns + 1):
            text += f"{around}<row_{row}_col_{column}>{placeholder}"
        text += "\n"
    return text + ("\n" if rows else "") + f"{around}{whole}{placeholder}{around}"


def _between(placeholder: str, grid: Grid) -> str:
    """A run between two tokens (Gemma 4)."""
    return f"<|image>{placeholder}<image|>"


def _between_tokens(placeholder: str, grid: Grid) -> str:
    """One picture, or several if the processor also gives crops of a long image (Gemma 3)."""
    one = f"\n\n<start_of_image>{placeholder}<end_of_image>\n\n"
    _, crops = grid
    if not crops:
        return one
    return (
        f"Here is the original image {one} and here are some crops to help you see better "
        + " ".join([one] * crops)
    )


FAMILIES = {
    "gemma3": Family("<start_of_image>", _between_tokens),
    "gemma4": Family("", _between, _all_in_one),
    "llava": Family("", _one),
    "idefics3": Family("", _tiled, options={"return_row_col_info": True}),
    "pixtral": Family("", _rows, _by_rows, patch_is_unit=True),
    "qwen": Family("", _one, _all_in_one),
}
"""Families by their names, which the worker gives."""
