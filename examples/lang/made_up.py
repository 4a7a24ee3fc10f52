"""Inputs of the programs in this folder: facts of an invented world, since the built-in model does
not know the real one.

Each function makes the input of one program, always the same. The sentences are of the kinds that
the model was trained on, see examples/train_demo_model.
"""

import random
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")
Facts = dict[str, dict[str, str]]
"""Of each thing, the value of each of its fields."""

ANSWER_FROM = "Answer from this text.\n\n"
FIELDS = ("captain", "cargo", "pilot", "berth", "owner", "guard")


class World:
    """Fresh names from a seed, and facts about them."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._used: set[str] = set()

    def name(self) -> str:
        while True:
            parts = [self._random.choice("bdfgklmnprstvz") + self._random.choice("aeiou") for _ in range(2)]  # fmt: skip
            name = "".join(parts).capitalize() + self._random.choice("lmnrsk")
            if name not in self._used:
                self._used.add(name)
                return name

    def names(self, count: int) -> list[str]:
        return [self.name() for _ in range(count)]

    def facts(self, count: int, fields: Sequence[str]) -> Facts:
        return {self.name(): {field: self.name() for field in fields} for _ in range(count)}

    def choose(self, options: Sequence[T]) -> T:
        return self._random.choice(options)

    def shuffled(self, items: Sequence[T]) -> list[T]:
        return self._random.sample(items, len(items))


def told(facts: Facts) -> str:
    """Facts as sentences, a paragraph for each thing."""
    return "\n".join(
        " ".join(f"The {field} of {name} is {value}." for field, value in fields.items())
        for name, fields in facts.items()
    )


def last_word(answer: str) -> str:
    """``The captain of Velta is Moren.`` → ``Moren``."""
    return answer.rstrip(". ").rpartition(" ")[2]


def majority(answers: Sequence[str]) -> str:
    """The most frequent; of equally frequent ones the first."""
    return Counter(answers).most_common(1)[0][0]


# ------------------------------------------------------------ few-shot benchmark

SUBJECTS = {
    "bank": ("account", "credit", "card", "loan"),
    "post": ("parcel", "letter", "stamp", "address"),
    "inn": ("room", "bed", "meal", "key"),
    "school": ("lesson", "teacher", "grade", "book"),
    "shop": ("invoice", "refund", "delivery", "price"),
    "ferry": ("ticket", "cabin", "harbor", "route"),
    "clinic": ("doctor", "scale", "diet", "bill"),
    "office": ("password", "printer", "phone", "desk"),
}
TEXTS = (
    "{name} wrote to us about the {label}.",
    "{name} has a question about the {label}.",
    "The {label} of {name} is broken.",
    "{name} is happy with the {label}.",
    "Yesterday {name} asked for the {label} again.",
)


@dataclass(frozen=True)
class Subject:
    name: str
    labels: tuple[str, ...]
    examples: tuple[tuple[str, str], ...]
    """Texts and their labels."""

    def ask(self, text: str) -> str:
        return f"Choose one label for the text.\nLabels: {', '.join(self.labels)}\nText: {text}"


@dataclass(frozen=True)
class Question:
    subject: Subject
    text: str
    label: str


def benchmark(questions_each: int = 6, examples_each: int = 12) -> list[Question]:
    """Questions of eight subjects in random order, as benchmarks keep them to have a fair running
    score."""
    world = World(1)

    def labelled(labels: tuple[str, ...]) -> tuple[str, str]:
        label = world.choose(labels)
        return world.choose(TEXTS).format(name=world.name(), label=label), label

    questions = []
    for name, labels in SUBJECTS.items():
        subject = Subject(name, labels, tuple(labelled(labels) for _ in range(examples_each)))
        questions += [Question(subject, *labelled(labels)) for _ in range(questions_each)]
    return world.shuffled(questions)


# ------------------------------------------------------------ ReAct agent

HOMES: dict[str, str] = {}
CAPTAINS: dict[str, str] = {}
TOOL_S = 0.2
"""How long a look into a register takes."""


def get_captain(ship: str) -> dict[str, str]:
    """captain by ship"""
    time.sleep(TOOL_S)
    return {"captain": CAPTAINS.get(ship, "unknown")}


def get_home(captain: str) -> dict[str, str]:
    """home by captain"""
    time.sleep(TOOL_S)
    return {"home": HOMES.get(captain, "unknown")}


@dataclass(frozen=True)
class Errand:
    handbook: str
    """Tells the ship of each customer; captains and their homes are in registers."""
    customer: str
    home: str
    """Of the captain of the customer's ship."""


def errands(count: int = 8) -> list[Errand]:
    world = World(2)
    made = []
    for _ in range(count):
        customers = world.facts(8, ("ship", "agent"))
        customer = world.choose(list(customers))
        ship, captain, home = customers[customer]["ship"], world.name(), world.name()
        CAPTAINS[ship], HOMES[captain] = captain, home
        made.append(Errand(told(customers), customer, home))
    return made


# ------------------------------------------------------------ tree of thought

ROADS = ("road", "river", "ferry")


@dataclass(frozen=True)
class Map:
    text: str
    start: str
    ways: dict[str, dict[str, str]]
    """From each place, where each road leads."""
    treasures: dict[str, int]
    """Of each place."""

    def best_treasure(self, depth: int, width: int) -> int:
        """What a search finds that makes no mistake."""
        best = [self.start]
        for _ in range(depth):
            ends = [self.ways[place][road] for place in best for road in ROADS]
            best = sorted(ends, key=self.treasures.__getitem__, reverse=True)[:width]
        return self.treasures[best[0]]


def maps(count: int = 6, places_each: int = 8) -> list[Map]:
    """From each place three ways lead to others, and each place has a treasure."""
    world = World(3)
    made = []
    for _ in range(count):
        places = world.names(places_each)
        worth = {place: world.choose(range(100, 1000)) for place in places}
        ways = {}
        for place in places:
            ends = world.shuffled([other for other in places if other != place])
            ways[place] = dict(zip(ROADS, ends, strict=False))
        facts = {place: ways[place] | {"treasure": str(worth[place])} for place in places}
        made.append(Map(told(facts), places[0], ways, worth))
    return made


# ------------------------------------------------------------ documents and questions


@dataclass(frozen=True)
class Asked:
    """A question that a text answers."""

    question: str
    answer: str


def library(num_documents: int = 10, questions_each: int = 4) -> tuple[list[str], list[Asked]]:
    """Documents, and questions about them in the order in which readers come."""
    world = World(4)
    shelves = [world.facts(7, world.shuffled(FIELDS)[:3]) for _ in range(num_documents)]
    asked = [question for facts in shelves for question in questions_about(world, facts, questions_each)]  # fmt: skip
    return [told(facts) for facts in shelves], world.shuffled(asked)


def questions_about(world: World, facts: Facts, count: int) -> list[Asked]:
    pairs = [(name, field) for name, fields in facts.items() for field in fields]
    return [
        Asked(f"What is the {field} of {name}?", facts[name][field])
        for name, field in world.shuffled(pairs)[:count]
    ]


def best_documents(question: str, documents: Sequence[str], count: int = 2) -> list[str]:
    """Those that hold most of the question's words: a stand-in for a search engine."""
    words = question.rstrip("?").split()
    return sorted(documents, key=lambda text: -sum(f" {word}" in text for word in words))[:count]


def chats(count: int = 6) -> list[tuple[str, list[Asked]]]:
    """A text about towns, and what somebody asks about it turn by turn."""
    world = World(5)
    made = []
    for _ in range(count):
        towns = world.facts(8, ("mayor", "river", "tower"))
        first, second, third = world.shuffled(list(towns))[:3]
        turns = [
            Asked(f"What is the mayor of {first}?", towns[first]["mayor"]),
            Asked("And its river?", towns[first]["river"]),
            Asked(f"What about {second}?", towns[second]["river"]),
            Asked("And the tower?", towns[second]["tower"]),
            Asked(f"What about {third}?", towns[third]["tower"]),
            Asked("And its mayor?", towns[third]["mayor"]),
        ]
        made.append((told(towns), turns))
    return made


def ship_records(count: int = 24) -> list[tuple[str, dict[str, str | int]]]:
    """Texts, and what stands in them."""
    world = World(6)
    made = []
    for _ in range(count):
        name, captain, fee, home = world.name(), world.name(), world.choose(range(10, 1000)), world.name()  # fmt: skip
        text = f"This is about {name}. Its captain is {captain}. Its fee is {fee}. Its home is {home}."  # fmt: skip
        made.append((text, {"name": name, "captain": captain, "fee": fee, "home": home}))
    return made


def hard_questions(count: int = 8) -> list[tuple[str, Asked]]:
    """Long texts, and a question about each that a single sampled answer gets wrong now and
    then."""
    world = World(7)
    made = []
    for _ in range(count):
        facts = world.facts(12, FIELDS[:3])
        made.append((told(facts), questions_about(world, facts, 1)[0]))
    return made


# ------------------------------------------------------------ judge

ASPECTS = ("captain", "cargo", "pilot")


@dataclass(frozen=True)
class Duel:
    """Two reports about one ship, and the log that knows better."""

    log: str
    ship: str
    reports: tuple[dict[str, str], dict[str, str]]
    """Sentences by aspect."""
    better: int
    """Which report has more of the log's facts."""


def duels(count: int = 8) -> list[Duel]:
    world = World(8)
    made = []
    for _ in range(count):
        ships = world.facts(10, ASPECTS)
        ship, better = world.choose(list(ships)), world.choose((0, 1))
        slips = set(
            world.shuffled(ASPECTS)[:2]
        )  # of the worse report; the better one errs in the third
        reports: list[dict[str, str]] = []
        for number in (0, 1):
            wrong = slips if number != better else set(ASPECTS) - slips
            values = {a: world.name() if a in wrong else ships[ship][a] for a in ASPECTS}
            reports.append({a: f"The {a} of {ship} is {value}." for a, value in values.items()})
        made.append(Duel(told(ships), ship, (reports[0], reports[1]), better))
    return made
