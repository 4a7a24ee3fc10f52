"""Writes the table of other engines' flags, which is radixrt/base/settings/peers.py, into
docs/internals/peer_flags.md."""

from collections.abc import Iterable
from pathlib import Path

from radixrt.base.settings import peers
from radixrt.base.settings.setting import flag_of

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "internals/peer_flags.md"
HEAD = """# Flags of other engines

<!-- Written by `make docs` from radixrt/base/settings/peers.py; a test holds the two together. -->

The settings of vLLM, SGLang, llama.cpp and Ollama that `radixrt serve`, `radixrt run`, files of `--config` and `LLM` understand;
[the guide](../guides/coming_from.md) has endpoints, fields and variables.
"""


def page() -> str:
    """The text of the page as the table is now."""
    aliases = {flag_of(name): names.split() for name, names in peers.ALIASES.items()}
    for flag, (name, value) in peers.CONSTANTS.items():
        ours = flag_of(name) if value is True else f"{flag_of(name)} {value}"
        aliases.setdefault(ours, []).append(flag)
    values = []
    for name, pairs in peers.VALUES.items():
        for ours in dict.fromkeys(pairs.values()):
            theirs = [value for value in pairs if pairs[value] == ours]
            meaning = "the default" if ours is None else f"`{ours}`"
            values.append((f"`{flag_of(name)}` {_codes(theirs)}", meaning))
    for name, (reason, words) in peers.DEFAULTED.items():
        values.append((f"`{flag_of(name)}` {_codes(words.split())}", f"`auto`: {reason}"))
    refused_values = [
        (f"`{flag_of(name)}` {_codes(words.split())}", answer)
        for name, (answer, words) in peers.ANSWERS.items()
    ]
    ignored = [
        (_codes(flag.rstrip("=") for flag in " ".join(names).split()), reason)
        for reason, names in peers.IGNORED.items()
    ]
    off = [(f"`{flag}` false or 0", f"`{flag_of(name)}` {value}") for flag, (name, value) in peers.OFF.items()]  # fmt: skip
    refused = [(_codes(flags.split()), answer) for answer, flags in peers.REFUSED.items()]
    return "\n".join(
        [
            HEAD,
            "## Aliases\n", _table("theirs", ((_codes(theirs), f"`{ours}`") for ours, theirs in aliases.items())),
            "## Values\n", _table("theirs", [*values, *off]),
            "## Accepted without effect\n", _table("theirs", ignored, "note"),
            "## Refused\n", _table("theirs", [*refused, *refused_values], "answer"),
        ]
    )  # fmt: skip


def _table(left: str, rows: Iterable[tuple[str, str]], right: str = "here") -> str:
    lines = [f"| {left} | {right} |", "|---|---|", *(f"| {one} | {two} |" for one, two in rows)]
    return "\n".join(lines) + "\n"


def _codes(words: Iterable[str]) -> str:
    return ", ".join(f"`{word}`" for word in words)


if __name__ == "__main__":
    PAGE.write_text(page())
