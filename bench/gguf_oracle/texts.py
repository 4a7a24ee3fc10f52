"""Seeded texts on which tokenizers may differ: many scripts, code, odd whitespace, control tokens,
any characters."""
# ruff: noqa: RUF001 (characters that look like others are what tokenizers must tell apart)

import random
import string
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

SENTENCES = (
    "The quick brown fox jumps over the lazy dog. It's 12,345.67 km away, isn't it?",
    "Où est la bibliothèque ? Elle s'est fermée à 18h30, n'est-ce pas…",
    "Falsches Üben von Xylophonmusik quält jeden größeren Zwerg.",
    "El pingüino Wenceslao hizo kilómetros bajo exhaustiva lluvia; ¿añoraba a su querido cachorro?",
    "Съешь ещё этих мягких французских булок, да выпей чаю. Їжак, ґанок.",
    "Ξεσκεπάζω την ψυχοφθόρα βδελυγμία. Τάχιστη αλώπηξ.",
    "我能吞下玻璃而不伤身体。今天是2026年11月22日,天气很好!",
    "いろはにほへと ちりぬるを、東京タワーの高さは333メートルです。カタカナもある。",
    "키스의 고유조건은 입술끼리 만나야 하고 특별한 기술은 필요치 않다.",
    "نص حكيم له سر قاطع وذو شأن عظيم مكتوب على ثوب أخضر ومغلف بجلد أزرق ١٢٣٤",
    "דג סקרן שט בים מאוכזב ולפתע מצא לו חברה איך הקליטה",
    "ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण का सर्वनाश १२३",
    "เป็นมนุษย์สุดประเสริฐเลิศคุณค่า กว่าบรรดาฝูงสัตว์เดรัจฉาน",
    "Do bạch kim rất quý nên sẽ dùng để lắp vô xương. Tiếng Việt có dấu.",
    "Pijamalı hasta yağız şoföre çabucak güvendi. İIıi",
    "Příliš žluťoučký kůň úpěl ďábelské ódy. Zażółć gęślą jaźń.",
    "யாமறிந்த மொழிகளிலே தமிழ்மொழி போல் இனிதாவது எங்கும் காணோம்",
    "ქართული ენა; Հայերեն լեզու; ភាសាខ្មែរ; မြန်မာဘာသာ; ᠮᠣᠩᠭᠣᠯ",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪🇯🇵 👍🏽 1️⃣ ☺️ 🤷🏾‍♀️ ❤️‍🔥",
    "e\u0301 vs é, A\u030a vs Å, n\u0303o, ﬁ ligature, Ⅷ, ½, x²₃, ｆｕｌｌｗｉｄｔｈ, ℌ𝔢𝔩𝔩𝔬 𝟙𝟚𝟛",
)
WHITESPACE = (" ", "  ", "   ", "\t", "\n", "\n\n", "\r\n", "\r", " \n", "\n ", "\t\t", "\x0b", "\x0c", "\x85", "\u00a0",
              "\u1680", "\u2003", "\u2028", "\u2029", "\u200b", "\u200d", "\u202f", "\u3000", "\ufeff", "\u2581", " " * 17)  # fmt: skip
ODDITIES = ("'s", "'S", "'ll", "'RE", "’s", "I'VE", "0", "00", "007", "1234567890", "3.14e-10", "----", "====", "......", "!?!?",
            "\\n", "\\u00e9", "\x00", "\x01", "\x1b[0m", "\x7f", "\ufffd", "\ue000", "\U000e0041", "\U0010fffd", "aaaaaaaaaaaaaaaa",
            "<0x0A>", "<s>", "</s>", "<unk>", "<pad>", "<|endoftext|>", "<start_of_turn>", "[INST]", "<", ">", "<|", "|>", "_", "__init__")  # fmt: skip


def make_texts(count: int, control_tokens: Sequence[str]) -> list[str]:
    """Texts, all different.

    Args:
        control_tokens: of the tokenizer's own vocabulary; they come in a third of the texts.
    """
    rng = random.Random(0)
    lines = _code_lines()
    texts: dict[str, None] = dict.fromkeys([*SENTENCES, *WHITESPACE, *ODDITIES])
    while len(texts) < count:
        kinds = rng.choices(("words", "code", "space", "odd", "any"), (6, 3, 3, 2, 1), k=rng.randint(1, 12))  # fmt: skip
        pieces = [_piece(rng, kind, lines) for kind in kinds]
        if control_tokens and rng.random() < 1 / 3:
            pieces.insert(rng.randint(0, len(pieces)), rng.choice(control_tokens))
        texts["".join(pieces)] = None
    return list(texts)[:count]


def _piece(rng: random.Random, kind: str, lines: Sequence[str]) -> str:
    match kind:
        case "words":
            sentence = rng.choice(SENTENCES)
            start = rng.randrange(len(sentence))
            return sentence[start : start + rng.randint(1, 60)]
        case "code":
            return rng.choice(lines) + rng.choice(("", "\n", "\r\n"))
        case "space":
            return "".join(rng.choices(WHITESPACE, k=rng.randint(1, 4)))
        case "odd":
            return rng.choice(ODDITIES)
        case _:
            return "".join(_characters(rng))


def _characters(rng: random.Random) -> Iterator[str]:
    """Characters of one block of Unicode, and a few of ASCII."""
    start = rng.choice((0x20, 0xA0, 0x300, 0x370, 0x5D0, 0x900, 0xE00, 0x1E00, 0x2000, 0x2190, 0x3040, 0x4E00, 0xAC00, 0xFB00,
                        0xFF00, 0x10000, 0x1D400, 0x1F300, 0x20000))  # fmt: skip
    for _ in range(rng.randint(1, 12)):
        yield (
            rng.choice(string.printable) if rng.random() < 0.2 else chr(start + rng.randrange(0x80))
        )


def _code_lines() -> list[str]:
    """Lines of the standard library's modules, and some of other languages."""
    library = Path(sysconfig.get_paths()["stdlib"])
    lines = [
        line
        for name in ("ast", "json/decoder", "typing", "asyncio/tasks")
        for line in (library / f"{name}.py").read_text().splitlines()
        if line.strip()
    ]
    return [*lines, "for(int i=0;i<n;++i){a[i]^=b[i]<<3;}", "SELECT * FROM t WHERE x>=10 AND y IN ('a','b');",
            "\t\tfmt.Printf(\"%-10s|%5.2f\\n\", s, f)", "<div class=\"a b\" id='x'>&nbsp;</div>", "$\\frac{\\partial f}{\\partial x}$",
            "#!/bin/bash\nset -euo pipefail\nx=${1:-$(pwd)}", "fn main() -> Result<(), Box<dyn Error>> { Ok(()) }"]  # fmt: skip
