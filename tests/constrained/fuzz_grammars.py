"""Generates random grammars of every kind, and measures how long they delay another client's
stream.

``python -m tests.constrained.fuzz_grammars --grammars 1000 --seed 0`` starts a server with the
built-in model, prints a table, and exits with 1 if a grammar made a gap of more than MAX_GAP_S in
the stream each time that it was tried. A failure names its kind and seed.
"""

import argparse
import itertools
import json
import random
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from bench.local_server import local_server
from tests.constrained.fuzz_schemas import SchemaMaker

MAX_GAP_S = 0.2
"""Between two tokens of another client's stream."""
TRIES = 4
"""A gap counts if it comes each time: a busy machine makes some of its own."""
ANSWERED = (200, 400, 422)
"""The last where a grammar became too complex in the middle of an answer."""
TIMEOUT_S = 0.5
"""Of each request."""

_LITERALS = ("a", "b", "c", "ab", "x ", "a" * 30)
_CLASSES = ("[a-z]", "[a-zA-Z0-9 ]", "[^a]")
_REPETITIONS = ("*", "+", "?", "{0,3}", "{2,50}", "{1,1000}")


class GrammarMaker:
    """Random grammars of one seed: rules of literals, classes, references and repetitions, nested
    two deep."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self._num_rules = self.random.randint(1, 5)

    def ebnf(self) -> str:
        names = ["root", *(f"r{index}" for index in range(self._num_rules))]
        return "\n".join(f"{name} ::= {self._alternatives(2, json.dumps, str)}" for name in names)

    def lark(self) -> str:
        names = ["start", *(f"r{index}" for index in range(self._num_rules))]

        def of_class(letters: str) -> str:
            return f"/{letters}/"

        return "\n".join(f"{name}: {self._alternatives(2, json.dumps, of_class)}" for name in names)

    def regex(self) -> str:
        self._num_rules = 0
        return self._alternatives(3, str, str, gap="")

    def regular(self, literal: Callable[[str], str] = json.dumps, gap: str = " ") -> str:
        """The right side of an EBNF rule without references; or, of the same seed, the same as a
        regular expression."""
        self._num_rules = 0
        return self._alternatives(1, literal, str, gap)

    def schema(self) -> dict[str, Any]:
        return SchemaMaker(self.random.randrange(1 << 30)).make()

    def structural_tag(self) -> dict[str, Any]:
        return {"type": "structural_tag", "format": self._format(3)}

    def _format(self, depth: int) -> dict[str, Any]:
        kinds = ["const_string", "regex", "json_schema", "grammar"]
        kinds += ["sequence", "or", "optional", "star", "plus", "repeat", "tag"] if depth else []
        kind = self.random.choice(kinds)
        match kind:
            case "const_string":
                return {"type": kind, "value": self.random.choice(_LITERALS)}
            case "regex":
                return {"type": kind, "pattern": self.regex()}
            case "json_schema":
                return {"type": kind, "json_schema": self.schema()}
            case "grammar":
                self._num_rules = 2
                return {"type": kind, "grammar": self.lark()}
            case "sequence" | "or":
                parts = [self._format(depth - 1) for _ in range(self.random.randint(1, 4))]
                return {"type": kind, "elements": parts}
            case "repeat":
                least, most = self.random.choice(((0, 3), (2, 50), (1, 1000)))
                return {"type": kind, "content": self._format(depth - 1), "min": least, "max": most}
            case "tag":
                content = self._format(depth - 1)
                return {"type": kind, "begin": "<a>", "content": content, "end": "</a>"}
        return {"type": kind, "content": self._format(depth - 1)}

    def _alternatives(
        self,
        depth: int,
        literal: Callable[[str], str],
        of_class: Callable[[str], str],
        gap: str = " ",
    ) -> str:
        def part() -> str:
            kind = self.random.random()
            if kind < 0.3 and self._num_rules:
                atom = f"r{self.random.randrange(self._num_rules)}"
            elif kind < 0.5 and depth:
                atom = f"({self._alternatives(depth - 1, literal, of_class, gap)})"
            elif kind < 0.75:
                text = self.random.choice(_LITERALS)
                atom = literal(text) if gap or len(text) == 1 else f"({literal(text)})"
            else:
                atom = of_class(self.random.choice(_CLASSES))
            return atom + self.random.choice(("", "", *_REPETITIONS))

        sequences = [
            gap.join(part() for _ in range(self.random.randint(1, 3)))
            for _ in range(self.random.randint(1, 3))
        ]
        return f"{gap}|{gap}".join(sequences)


def _schema_field(maker: GrammarMaker) -> dict[str, Any]:
    return {"guided_json": maker.schema()}


KINDS: dict[str, Callable[[GrammarMaker], dict[str, Any]]] = {
    "ebnf": lambda maker: {"guided_grammar": maker.ebnf()},
    "lark": lambda maker: {"guided_grammar": maker.lark()},
    "regex": lambda maker: {"guided_regex": maker.regex()},
    "schema": _schema_field,
    "tags": lambda maker: {"structural_tag": maker.structural_tag()},
}
"""The fields of a request with a random grammar."""

ATTACK = """\
root ::= [a-z]{1,1000} "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa" | r0? r0? r0?
r0 ::= r0 | "b" "b"* | "x "? (r0{2,50} [a-z] ([a-zA-Z0-9 ]{0,3} "c"{0,3} [\\x00-\\uFFFF]* | "c" | \
"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"+ r0*){2,50} | "a" ([a-zA-Z0-9 ]{1,1000} "b"{1,1000} r0* | r0? "ab" r0+ | r0? \
"aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa"{2,50})?){0,3}
"""
"""A grammar that once stopped every other stream for seconds."""


class Stream(threading.Thread):
    """A client that reads endless answers token by token, and notes the time of each."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url = url
        self._times = [time.monotonic()]
        self._ended = threading.Event()

    def run(self) -> None:
        body = {"prompt": "The", "stream": True, "ignore_eos": True, "max_tokens": 2000}
        for seed in itertools.count():
            with post(self._url, body | {"seed": seed}) as response:
                for line in response:
                    if self._ended.is_set():
                        return
                    if line.startswith(b"data: {"):
                        self._times.append(time.monotonic())

    def gap_since(self, begin: float) -> float:
        """The largest gap between two tokens, in seconds, of which the second came after ``begin``;
        or up to now."""
        times = [*self._times, time.monotonic()]
        return max(after - before for before, after in itertools.pairwise(times) if after > begin)

    def end(self) -> None:
        self._ended.set()
        self.join(10)


def post(url: str, body: dict[str, Any]) -> Any:
    data = json.dumps(body).encode()
    headers = {"content-type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/completions", data, headers)
    return urllib.request.urlopen(request, timeout=60)


@dataclass(frozen=True)
class Outcome:
    """The effect of one grammar."""

    kind: str
    seed: int
    status: int
    gap_s: float


def attack(url: str, stream: Stream, kind: str, seed: int, fields: dict[str, Any]) -> Outcome:
    """Send a grammar, several times if the stream has a gap meanwhile; the outcome with the
    smallest gap."""
    outcomes: list[Outcome] = []
    while not outcomes or (outcomes[-1].gap_s > MAX_GAP_S and len(outcomes) < TRIES):
        body = {"prompt": "a", "max_tokens": 40, "temperature": 1.0, "seed": seed}
        again = _written_anew(fields, len(outcomes))
        begin = time.monotonic()
        try:
            with post(url, body | {"timeout": TIMEOUT_S} | again) as response:
                status = response.status
                response.read()
        except urllib.error.HTTPError as error:
            status = error.code
            error.read()
        outcomes.append(Outcome(kind, seed, status, stream.gap_since(begin)))
    return min(outcomes, key=lambda outcome: outcome.gap_s)


def _written_anew(fields: dict[str, Any], time: int) -> dict[str, Any]:
    """The same grammar in another text, which nothing has cached, so that what it costs once is
    seen each time."""
    if not time:
        return fields
    ((field, grammar),) = fields.items()
    match field:
        case "guided_grammar":
            comment = "#" if "::=" in grammar else "//"
            return {field: f"{grammar}\n{comment} {time}\n"}
        case "guided_regex":
            return {field: "(" * time + grammar + ")" * time}
        case "guided_json":
            return {field: {"allOf": [grammar], "$comment": str(time)}}
    for _ in range(time):
        grammar = grammar | {"format": {"type": "sequence", "elements": [grammar["format"]]}}
    return {field: grammar}


def attacks(url: str, kinds: Iterable[str], seeds: range) -> list[Outcome]:
    """Send the grammars of these seeds, one after the other, beside a stream."""
    stream = Stream(url)
    stream.start()
    try:
        outcomes = [attack(url, stream, "the attack", 0, {"guided_grammar": ATTACK})]
        for kind in kinds:
            for seed in seeds:
                outcomes.append(attack(url, stream, kind, seed, KINDS[kind](GrammarMaker(seed))))
                if outcomes[-1].gap_s > MAX_GAP_S or outcomes[-1].status not in ANSWERED:
                    print(outcomes[-1], KINDS[kind](GrammarMaker(seed)), flush=True)
        return outcomes
    finally:
        stream.end()


def main() -> int:
    """Read the arguments, send the grammars, and print; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--grammars", type=int, default=1000, help="Of each kind.")
    parser.add_argument("--seed", type=int, default=0, help="The first; each grammar has the next.")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    arguments = parser.parse_args()
    seeds = range(arguments.seed, arguments.seed + arguments.grammars)
    with local_server("demo", "--log-level", "error") as url:
        outcomes = attacks(url, arguments.kinds, seeds)
    print(f"{'kind':12} {'sent':>6} {'taken':>6} {'largest gap in ms':>18}")
    for kind in ("the attack", *arguments.kinds):
        of_kind = [outcome for outcome in outcomes if outcome.kind == kind]
        taken = sum(outcome.status == 200 for outcome in of_kind)
        gap_s = max(outcome.gap_s for outcome in of_kind)
        print(f"{kind:12} {len(of_kind):6} {taken:6} {1000 * gap_s:18.0f}")
    is_wrong = [each.gap_s > MAX_GAP_S or each.status not in ANSWERED for each in outcomes]
    return int(any(is_wrong))


if __name__ == "__main__":
    sys.exit(main())
