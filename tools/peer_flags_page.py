"""Writes the table of other engines' flags, which is radixrt/base/settings/peers.py, into
docs/guides/coming_from.md (the aliases) and docs/internals/peer_flags.md (all of it)."""

from collections.abc import Iterable
from pathlib import Path

from radixrt.base.settings import peers
from radixrt.base.settings.setting import flag_of

DOCS = Path(__file__).parents[1] / "docs"
GUIDE, FULL = DOCS / "guides/coming_from.md", DOCS / "internals/peer_flags.md"
BEGIN = "<!-- Aliases of radixrt/base/settings/peers.py; written by `make docs`. -->\n"
END = "<!-- The end of the aliases. -->\n"
HEAD = """# Flags of other engines

<!-- Written by `make docs` from radixrt/base/settings/peers.py; a test holds the two together. -->

The settings of vLLM, SGLang, llama.cpp and Ollama that `radixrt serve`, `radixrt run`, files of `--config` and `LLM` understand. The aliases are in
[the guide](../guides/coming_from.md#flags).
"""


def guide() -> str:
    """The text of the guide with the aliases as they are now."""
    before, _, rest = GUIDE.read_text().partition(BEGIN)
    rows = {flag_of(name): names.split() for name, names in peers.ALIASES.items()}
    for flag, (name, value) in peers.CONSTANTS.items():
        ours = flag_of(name) if value is True else f"{flag_of(name)} {value}"
        rows.setdefault(ours, []).append(flag)
    lines = _table("theirs", ((_codes(theirs), f"`{ours}`") for ours, theirs in rows.items()))
    return before + BEGIN + "\n" + lines + "\n" + END + rest.partition(END)[2]


def full() -> str:
    """The text of the page with the rest of the table."""
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
    GUIDE.write_text(guide())
    FULL.write_text(full())
