"""Workloads for a model of English: questions about the installed packages' documentation.

The model is a base model, so prompts show examples before they ask. Answers have fixed lengths, but
for JSON.
"""

import importlib.metadata
import json
import re
from dataclasses import dataclass
from functools import cache

from bench.peers_cpu.tasks import Task, Workload
from radixrt.bench.workloads import Conversation, Turn

DOCUMENT, PASSAGE, OPENING = 4200, 1000, 520
"""Lengths in characters; some 1,050, 250 and 130 tokens."""

_NO_PROSE = re.compile(
    r"^[ \t]*(?:[|<!#=*`~.:>-]|\[!?\[|\[?https?:)[^\n]*|`{3}.*?`{3}", re.M | re.S
)
_EXAMPLES = """\
Text: Flour and water are mixed and left for a day. The dough is then baked for forty minutes.
Question: How long is the dough baked?
Answer: For forty minutes.

Text: The library lends books for three weeks. Films are lent for one week, and only to members.
Question: Who may borrow films?
Answer: Only members.

"""
_QUESTIONS = (
    "What is this project for?",
    "How is it installed?",
    "Who is it made for?",
    "What does it need to run?",
    "What is the first step for a new user?",
    "What makes it different from similar projects?",
    "Where can users get help?",
    "Under which terms may it be used?",
)
_CHAT = (
    "Tell me about the Python package {name}.",
    "When would I use it?",
    "Give me an example.",
    "What could go wrong?",
    "Summarize that in one sentence.",
)
_FACTS_SCHEMA = {
    "type": "object",
    "properties": {name: {"type": "string", "maxLength": 40} for name in ("name", "version")},
    "required": ["name", "version"],
    "additionalProperties": False,
}


@dataclass(frozen=True)
class Package:
    """An installed package, as its author describes it."""

    name: str
    version: str
    summary: str
    prose: str
    """The paragraphs of its description."""


def workloads() -> list[Workload]:
    """Raises ``ValueError`` if too few packages with documentation are installed."""
    packages = installed_packages()
    long = [package for package in packages if len(package.prose) >= DOCUMENT][:4]
    short = [package for package in packages if len(package.prose) >= PASSAGE][-32:]
    if len(long) < 4 or len(short) < 32:
        raise ValueError("Too few of the installed packages have documentation of some length.")
    heads = [f"{_EXAMPLES}Text: {package.prose[:DOCUMENT]}" for package in long]
    rag = [
        Conversation(head, [Turn(f"\nQuestion: {question}\nAnswer:", 32)])
        for question in _QUESTIONS
        for head in heads
    ]
    summaries = [
        Conversation("", [Turn(f"{package.prose[:PASSAGE]}\n\nIn short:", 64)]) for package in short
    ]
    chats = [
        Conversation("", [Turn(question.format(name=package.name), 32) for question in _CHAT])
        for package in short[:8]
    ]
    stream = [Conversation("", [Turn(long[0].prose[:OPENING], 128)])]
    facts = [_facts(package, example=short[0]) for package in short[1:17]]
    return [
        Workload("a", "4 documents of 1050 x 8 questions, 32 out", rag, 16),
        Workload("b", "32 passages of 250, 64 out", summaries, 16),
        Workload("c", "8 chats of 5 turns, 32 out each", chats, 8, "chat"),
        Workload("d", "one stream of prose, 130 in, 128 out", stream, 1),
        Workload("e", "16 facts as JSON of a schema", facts, 8, "chat"),
    ]


def _facts(package: Package, example: Package) -> Task:
    """Name and version of a package, after an example of another one."""

    def text(of: Package) -> str:
        return f"Text: {of.name} {of.version}: {of.summary}\nJSON: "

    def answer(of: Package) -> str:
        return json.dumps({"name": of.name, "version": of.version})

    question = f"{text(example)}{answer(example)}\n{text(package)}"
    return Task("", [Turn(question, 96)], schema=_FACTS_SCHEMA, right=(answer(package),))


@cache
def installed_packages() -> list[Package]:
    """The packages by name."""
    found = {}
    for distribution in importlib.metadata.distributions():
        about = distribution.metadata.json
        description = str(about.get("description") or "")
        paragraphs = [
            " ".join(paragraph.split())
            for paragraph in _NO_PROSE.sub("", description).split("\n\n")
            if len(paragraph) > 60
        ]
        found[distribution.name] = Package(
            distribution.name,
            distribution.version,
            str(about.get("summary") or ""),
            "\n\n".join(paragraphs),
        )
    return [found[name] for name in sorted(found)]
