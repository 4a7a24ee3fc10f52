"""Books of invented facts, cut into passages, with questions about them: the world that the
built-in model was trained on."""

import random
import sys
from dataclasses import dataclass
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1] / "train_demo_model"))

import world

ENTITIES = 2
"""Of a passage."""
FIELDS = 3
"""Of each entity; those of a book are the same."""


@dataclass(frozen=True)
class Passage:
    """A piece of a text, with an id by which it can be cited."""

    id: str
    text: str


@dataclass(frozen=True)
class Question:
    """A question about one fact."""

    entity: str
    field: str
    answer: str
    source: str
    """The id of the passage that has the fact."""

    @property
    def text(self) -> str:
        return f"What is the {self.field} of {self.entity}?"

    @property
    def sentence(self) -> str:
        """The whole answer, as the built-in model gives it."""
        return f"The {self.field} of {self.entity} is {self.answer}."


def library(
    num_books: int, passages_each: int, seed: int = 0
) -> tuple[list[Passage], list[list[Question]]]:
    """All passages, and the questions of each book. No name, value or field was in the model's
    training."""
    rng = random.Random(seed)
    passages: list[Passage] = []
    questions: list[list[Question]] = []
    names: set[str] = set()
    while len(questions) < num_books:
        words = world.Words(rng, "eval")
        book = world.make_world(rng, words, ENTITIES * passages_each, FIELDS)
        sources = [words.code() for _ in range(passages_each)]
        if names.intersection([*book.entities, *sources]):
            continue
        names.update(book.entities, sources)
        asked = []
        for number, source in enumerate(sources):
            lines = []
            for entity in book.entities[number * ENTITIES : (number + 1) * ENTITIES]:
                facts = {field: book.facts[entity, field] for field in book.fields}
                asked += [Question(entity, *fact, source) for fact in facts.items()]
                told = (facts | {"source": source}).items()
                lines.append(
                    " ".join(f"The {field} of {entity} is {value}." for field, value in told)
                )
            passages.append(Passage(source, "\n".join(lines)))
        questions.append(asked)
    return passages, questions


def visits(questions: list[list[Question]], count: int, seed: int = 1) -> list[Question]:
    """Questions as readers ask them: some books are read more than others, by Zipf's law."""
    rng = random.Random(seed)
    weights = [1 / (1 + rank) for rank in range(len(questions))]
    return [rng.choice(book) for book in rng.choices(questions, weights, k=count)]
