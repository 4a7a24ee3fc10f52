"""Generates the training and evaluation texts of the demo model.

The texts are about invented entities. Each sample is a chat whose correct answer can be copied from
its prompt. Names, numbers, codes and field names are generated anew for each sample, so memorizing
them does not help. The hash of a word decides between the training split and the evaluation split,
so the two share no name, value or field name.
"""

from __future__ import annotations

import json
import random
import zlib
from dataclasses import dataclass, field
from typing import Any, Literal

Split = Literal["train", "eval"]
EVAL_SHARE = 5  # one word in five belongs to the evaluation split

ENGLISH_FIELDS = """
age altitude amount anchor area author badge balance banner battery bearing berth bell beam brand
breed bridge budget builder button cabin cable captain cargo channel chapter charge chief class
climate coach coast code color colour compass cost count crest crew crop currency deck degree depth
diet distance district doctor driver dock editor emblem engine entrance fee fence ferry festival
flag flavor fleet floor flower founder fuel garden gate grade guard guide habitat harbor height
helper horse host hour island job judge key label lake language leader length level limit lock
manager maker map mascot mass material mayor meal melody mentor metal model month motto mountain
museum nation neighbor nickname number office origin owner paint painter parent park partner
password pattern pet phone pilot planet plant plate pool port position power price prize product
profession province pupil quality quantity queen rank rate rating region rent rider ring river rival
road roof room route rule sail salary school score season seat sector shape shade shift shop sign
singer size skill sound speed sponsor sport station status stone street student supplier surface
symbol target tax teacher team temperature ticket title tool tower town trade trainer treasure tree
tribe uncle uniform unit vehicle vendor version village voltage volume wage wall weapon weather
weight width winner witness worker writer year zone
""".split()  # noqa: SIM905

ONSETS = """
b c d f g h j k l m n p r s t v w z br dr gr kr pl st tr sh th qu
""".split()  # noqa: SIM905
VOWELS = ["a", "e", "i", "o", "u"]
CODAS = ["", "", "", "l", "m", "n", "r", "s", "k", "x"]
LETTERS = "abcdefghijklmnopqrstuvwxyz"


def split_of(word: str) -> Split:
    """The split of this word, independent of its case."""
    return "eval" if zlib.crc32(word.lower().encode()) % EVAL_SHARE == 0 else "train"


class Words:
    """Generates new words of one split; within a sample no word is repeated."""

    def __init__(self, rng: random.Random, split: Split) -> None:
        self.rng = rng
        self.split = split
        self.used: set[str] = set()

    def fresh(self, make: Any) -> str:
        while True:
            word = make()
            key = word.lower()
            if key not in self.used and split_of(word) == self.split:
                self.used.add(key)
                return word

    def invented(self) -> str:
        r = self.rng
        if r.random() < 0.08:
            return "".join(r.choices(LETTERS, k=r.randint(3, 6)))
        n = r.choice((2, 2, 2, 2, 3))
        return "".join(r.choice(ONSETS) + r.choice(VOWELS) for _ in range(n)) + r.choice(CODAS)

    def name(self) -> str:
        """An entity: one or two capitalized words."""
        first = self.fresh(lambda: self.invented().capitalize())
        if self.rng.random() < 0.25:
            return first + " " + self.fresh(lambda: self.invented().capitalize())
        return first

    def noun(self) -> str:
        return self.fresh(self.invented)

    def field_name(self) -> str:
        if self.rng.random() < 0.4:
            return self.fresh(lambda: self.rng.choice(ENGLISH_FIELDS))
        return self.fresh(self.invented)

    def number(self) -> str:
        r = self.rng
        return self.fresh(lambda: str(r.randrange(10, 10 ** r.choice((2, 3, 3, 4, 4)))))

    def code(self) -> str:
        r = self.rng
        letters = LETTERS.upper()
        return self.fresh(
            lambda: "".join(r.choices(letters, k=2)) + "-" + str(r.randrange(10, 1000))
        )

    def value(self, kind: str) -> str:
        if kind == "number":
            return self.number()
        if kind == "code":
            return self.code()
        if kind == "word":
            return self.noun()
        return self.fresh(lambda: self.invented().capitalize())


VALUE_KINDS = ("number", "name", "word", "code", "name", "word")


@dataclass
class Sample:
    """A chat, its task, and the expected last assistant message."""

    task: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None


@dataclass
class World:
    """The facts of one document: entities with some common fields."""

    entities: list[str]
    fields: list[str]
    kinds: dict[str, str]
    facts: dict[tuple[str, str], str] = field(default_factory=dict)

    def value(self, entity: str, name: str) -> Any:
        text = self.facts[entity, name]
        return int(text) if self.kinds[name] == "number" else text


def make_world(rng: random.Random, words: Words, n_entities: int, n_fields: int) -> World:
    fields = [words.field_name() for _ in range(n_fields)]
    kinds = {f: rng.choice(VALUE_KINDS) for f in fields}
    world = World([words.name() for _ in range(n_entities)], fields, kinds)
    for e in world.entities:
        for f in fields:
            world.facts[e, f] = words.value(kinds[f])
    return world


STATEMENTS = (
    "The {f} of {e} is {v}.",
    "The {f} of {e} is {v}.",
    "{e}'s {f} is {v}.",
    "{e} has the {f} {v}.",
    "For {e}, the {f} is {v}.",
)
OPENINGS = ("This is about {e}.", "Here is what we know about {e}.", "{e} was seen again.")
FILLERS = (
    "It was a calm day.",
    "Nobody knows more about it.",
    "This was written down last year.",
    "The rest is not known.",
    "Many people have asked about this.",
)


def record(rng: random.Random, world: World) -> str:
    """A document about one entity, named once."""
    e = world.entities[0]
    its = rng.choice(("Its {f} is {v}.", "The {f} is {v}."))
    facts = [its.format(f=f, v=v) for (_, f), v in world.facts.items()]
    rng.shuffle(facts)
    return rng.choice((" ", "\n")).join([rng.choice(OPENINGS).format(e=e), *facts])


def document(rng: random.Random, world: World, plain_share: float = 0.6) -> str:
    """The facts as short sentences, one paragraph per entity or shuffled.

    A share of the documents uses only one wording. Learning other wordings after one is easy;
    learning all wordings at once is not.
    """
    statements = STATEMENTS[:1] if rng.random() < plain_share else STATEMENTS

    def state(e: str, f: str) -> str:
        return rng.choice(statements).format(e=e, f=f, v=world.facts[e, f])

    if len(world.entities) == 1 and rng.random() < 0.8:
        return record(rng, world)
    if rng.random() < 0.55:
        shuffled = [rng.sample(world.fields, len(world.fields)) for _ in world.entities]
        parts = [
            " ".join(state(e, f) for f in fs)
            for e, fs in zip(world.entities, shuffled, strict=True)
        ]
        separator = rng.choice((" ", "\n"))
    else:
        parts = [state(e, f) for e, f in world.facts]
        separator = " "
    rng.shuffle(parts)
    if rng.random() < 0.2:
        parts.insert(rng.randrange(len(parts) + 1), rng.choice(FILLERS))
    return separator.join(parts)


QUESTIONS = (
    "What is the {f} of {e}?",
    "What is the {f} of {e}?",
    "What is {e}'s {f}?",
    "Tell me the {f} of {e}.",
    "Which {f} does {e} have?",
)
ANSWER = "The {f} of {e} is {v}."
SYSTEMS = (
    "Answer from this text.\n\n{doc}",
    "Answer the questions from the document.\n\n{doc}",
    "You answer questions about this document:\n{doc}",
    "{doc}",
)
USERS = (
    "{doc}\n\n{q}",
    "Document:\n{doc}\n\nQuestion: {q}",
    "Read this text.\n{doc}\n\n{q}",
    "{doc} {q}",
)


def with_document(rng: random.Random, doc: str, first_question: str) -> list[dict[str, Any]]:
    """The opening of a chat: the document in the system turn, or before the first question."""
    if rng.random() < 0.5:
        return [
            {"role": "system", "content": rng.choice(SYSTEMS).format(doc=doc)},
            {"role": "user", "content": first_question},
        ]
    return [{"role": "user", "content": rng.choice(USERS).format(doc=doc, q=first_question)}]


def ask(
    chat: list[dict[str, Any]], rng: random.Random, doc: str, question: str, answer: str
) -> None:
    if chat:
        chat.append({"role": "user", "content": question})
    else:
        chat.extend(with_document(rng, doc, question))
    chat.append({"role": "assistant", "content": answer})


def answer_of(world: World, e: str, f: str) -> str:
    return ANSWER.format(e=e, f=f, v=world.facts[e, f])


def qa(rng: random.Random, words: Words, n_entities: int, n_fields: int, turns: int = 8) -> Sample:
    world = make_world(rng, words, n_entities, n_fields)
    doc = document(rng, world)
    chat: list[dict[str, Any]] = []
    keys = list(world.facts)
    for e, f in rng.sample(keys, min(turns, len(keys))):
        ask(chat, rng, doc, rng.choice(QUESTIONS).format(e=e, f=f), answer_of(world, e, f))
    return Sample("qa", chat)


SAME_ENTITY = ("And its {f}?", "And the {f}?", "What about its {f}?", "What is its {f}?")
SAME_FIELD = ("And {e}?", "What about {e}?", "And for {e}?")
OTHER_ONE = ("And the other one?", "What about the other one?")


def second_turn(
    rng: random.Random, words: Words, n_entities: int, n_fields: int, turns: int = 6
) -> Sample:
    """Follow-up questions that refer to the previous turn."""
    n_entities, n_fields = max(2, n_entities), max(2, n_fields)
    if rng.random() < 0.25:
        n_entities = 2
    world = make_world(rng, words, n_entities, n_fields)
    doc = document(rng, world)
    chat: list[dict[str, Any]] = []
    e, f = rng.choice(world.entities), rng.choice(world.fields)
    ask(chat, rng, doc, rng.choice(QUESTIONS).format(e=e, f=f), answer_of(world, e, f))
    for _ in range(turns - 1):
        kind = rng.random()
        if kind < 0.5:
            f = rng.choice([x for x in world.fields if x != f])
            question = rng.choice(SAME_ENTITY).format(f=f)
        elif kind < 0.75 or n_entities != 2:
            e = rng.choice([x for x in world.entities if x != e])
            question = rng.choice(SAME_FIELD).format(e=e)
        else:
            e = next(x for x in world.entities if x != e)
            question = rng.choice(OTHER_ONE)
        ask(chat, rng, doc, question, answer_of(world, e, f))
    return Sample("second_turn", chat)


JSON_ASKS = (
    "Give the facts about {e} as JSON with the fields {fs}.",
    "Extract {fs} of {e} as JSON.",
    "Write {e} as JSON. Fields: {fs}.",
)


def extract_json(
    rng: random.Random, words: Words, n_entities: int, n_fields: int, turns: int = 4
) -> Sample:
    world = make_world(rng, words, n_entities, n_fields)
    doc = document(rng, world)
    chat: list[dict[str, Any]] = []
    for e in rng.sample(world.entities, min(turns, n_entities)):
        names = rng.sample(world.fields, rng.randint(1, n_fields))
        answer: dict[str, Any] = {"name": e}
        answer |= {f: world.value(e, f) for f in names}
        question = rng.choice(JSON_ASKS).format(e=e, fs=", ".join(["name", *names]))
        ask(chat, rng, doc, question, json.dumps(answer))
    return Sample("json", chat)


LABEL_TEXTS = (
    "{e} wrote to us about the {w}.",
    "{e} has a question about the {w}.",
    "The {w} of {e} is broken.",
    "{e} is happy with the {w}.",
    "Yesterday {e} asked for the {w} again.",
)
LABEL_ASKS = (
    "Choose one label for the text.\nLabels: {ls}\nText: {t}",
    "Labels: {ls}\nText: {t}\nWhich label fits?",
    "{t}\nWhich of these labels fits?\nLabels: {ls}",
)


def label(rng: random.Random, words: Words, n_labels: int, turns: int = 3) -> Sample:
    """Choose the label that the text is about."""
    labels = [words.field_name() for _ in range(n_labels)]
    chat: list[dict[str, Any]] = []
    ask_text = rng.choice(LABEL_ASKS)
    for _ in range(turns):
        fits = rng.choice(labels)
        text = rng.choice(LABEL_TEXTS).format(e=words.name(), w=fits)
        chat.append({"role": "user", "content": ask_text.format(ls=", ".join(labels), t=text)})
        chat.append({"role": "assistant", "content": fits})
    return Sample("label", chat)


TOOL_VERBS = ("get", "find", "read", "check", "book", "order", "send", "open")
TOOL_ASKS = (
    "Call {t} with {args}.",
    "Use {t} with {args}.",
    "Please call {t} with {args}.",
    "Can you use {t} with {args}?",
)
TOOL_DESCRIPTIONS = ("{n} by {ps}", "Everything about {n}", "{n} for a user")


def make_tool(
    rng: random.Random, words: Words, verb: str
) -> tuple[dict[str, Any], str, dict[str, str]]:
    noun = words.field_name()
    params = {words.field_name(): rng.choice(VALUE_KINDS) for _ in range(rng.choice((1, 1, 2)))}
    properties = {p: {"type": "integer" if k == "number" else "string"} for p, k in params.items()}
    function = {
        "name": f"{verb}_{noun}",
        "description": rng.choice(TOOL_DESCRIPTIONS).format(n=noun, ps=" and ".join(params)),
        "parameters": {"type": "object", "properties": properties, "required": list(params)},
    }
    return {"type": "function", "function": function}, noun, params


def tool(rng: random.Random, words: Words, n_tools: int, turns: int = 2) -> Sample:
    """Call the tool that the request names; answer questions about the document without a tool."""
    verb = rng.choice(TOOL_VERBS)
    made = [make_tool(rng, words, verb) for _ in range(n_tools)]
    world = make_world(rng, words, 2, 2)
    doc = document(rng, world)
    chat: list[dict[str, Any]] = []
    has_doc = rng.random() < 0.4
    if has_doc:
        chat.append({"role": "system", "content": rng.choice(SYSTEMS).format(doc=doc)})
    for turn in range(turns):
        if has_doc and (turn == 0 or rng.random() < 0.3):
            e, f = rng.choice(list(world.facts))
            chat.append({"role": "user", "content": rng.choice(QUESTIONS).format(e=e, f=f)})
            chat.append({"role": "assistant", "content": answer_of(world, e, f)})
            continue
        spec, noun, params = rng.choice(made)
        values = {p: words.value(k) for p, k in params.items()}
        said = " and ".join(f"{p} {v}" for p, v in values.items())
        ask_text = rng.choice(TOOL_ASKS).format(
            t=spec["function"]["name"], v=verb, n=noun, args=said
        )
        chat.append({"role": "user", "content": ask_text})
        arguments = {p: int(v) if params[p] == "number" else v for p, v in values.items()}
        call = {"name": spec["function"]["name"], "arguments": arguments}
        chat.append(
            {
                "role": "assistant",
                "content": "",
                "tool_calls": [{"type": "function", "function": call}],
            }
        )
        if rng.random() < 0.5:
            result = words.value(rng.choice(VALUE_KINDS))
            chat.append({"role": "tool", "content": json.dumps({noun: result})})
            chat.append({"role": "assistant", "content": f"The {noun} is {result}."})
    return Sample("tool", chat, [spec for spec, *_ in made])


SMALL_TALK = (
    (
        ("Hello!", "Hello", "Hi", "Hi there!", "Good morning."),
        "Hello! Give me a text and ask me about it.",
    ),
    (
        ("Who are you?", "What are you?", "What is your name?"),
        "I am the demo model of radixrt. I answer from the text you give me.",
    ),
    (
        ("What can you do?", "Help", "How can you help me?"),
        "I look things up in a text, write them as JSON, choose labels and call tools.",
    ),
    (("Thanks!", "Thank you.", "Thanks"), "You are welcome."),
)


def small_talk(rng: random.Random) -> Sample:
    asks, answer = rng.choice(SMALL_TALK)
    return Sample(
        "talk",
        [{"role": "user", "content": rng.choice(asks)}, {"role": "assistant", "content": answer}],
    )


# Levels of difficulty: maximum (entities, fields) of a document.
LEVELS = ((1, 1), (2, 1), (2, 2), (3, 2), (4, 3), (6, 3), (10, 3), (16, 4), (23, 4))


def sample(rng: random.Random, task: str, level: int, split: Split = "train") -> Sample:
    """One chat of the given task. `level` indexes LEVELS."""
    words = Words(rng, split)
    n_entities, n_fields = LEVELS[level]
    if task == "qa":
        return qa(rng, words, n_entities, n_fields, turns=16 if level > 5 else 8)
    # Only questions use long documents: the other tasks have more answers per token with short
    # ones.
    level = min(level, rng.randint(2, 5))
    n_entities, n_fields = LEVELS[level]
    if task == "second_turn":
        return second_turn(rng, words, n_entities, n_fields)
    if task == "json":
        if rng.random() < 0.7:
            return extract_json(rng, words, 1, rng.randint(2, 5))
        return extract_json(rng, words, rng.randint(2, 4), max(2, n_fields))
    if task == "label":
        return label(rng, words, rng.randint(2, min(6, 3 + level)))
    if task == "tool":
        return tool(rng, words, rng.randint(1, min(4, 1 + level)))
    return small_talk(rng)


# ---- rendering ---------------------------------------------------------------------------------

TOOLS_HEAD = "# Tools\n\nCall a tool when the question needs it.\n<tools>\n"
TOOLS_TAIL = (
    "</tools>\n\nTo call a tool, write:\n<tool_call>\n"
    '{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>'
)


def render(
    messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None
) -> list[tuple[str, bool]]:
    """The chat template's text, cut into (text, is_answer) pieces; the template file is the same in
    Jinja."""
    pieces: list[tuple[str, bool]] = []
    start = 0
    if tools:
        head = "<|im_start|>system\n"
        if messages[0]["role"] == "system":
            head += messages[0]["content"] + "\n\n"
            start = 1
        head += (
            TOOLS_HEAD
            + "".join(json.dumps(t, ensure_ascii=False) + "\n" for t in tools)
            + TOOLS_TAIL
        )
        pieces.append((head + "<|im_end|>\n", False))
    for m in messages[start:]:
        if m["role"] == "assistant":
            pieces.append(("<|im_start|>assistant\n", False))
            body = m["content"] or ""
            for call in m.get("tool_calls") or []:
                if body:
                    body += "\n"
                body += (
                    "<tool_call>\n"
                    + json.dumps(call["function"], ensure_ascii=False)
                    + "\n</tool_call>"
                )
            pieces.append((body + "<|im_end|>", True))
            pieces.append(("\n", False))
        elif m["role"] == "tool":
            pieces.append(
                (
                    f"<|im_start|>user\n<tool_response>\n{m['content']}\n</tool_response><|im_end|>\n",
                    False,
                )
            )
        else:
            pieces.append((f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n", False))
    return pieces
