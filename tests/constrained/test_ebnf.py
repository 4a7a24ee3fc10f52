"""EBNF grammars: the texts that they take, the sentences of their errors, and who may call their
matchers."""

import random
import re
import threading
import time

import pytest

from radixrt.constrained.backends import llguidance
from radixrt.constrained.errors import CannotCompile
from radixrt.constrained.loader import load_grammar
from radixrt.constrained.tokenizer_facts import TokenizerFacts
from tests.constrained.fuzz_grammars import GrammarMaker
from tests.constrained.vocabularies import facts_of


def takes(grammar: str, facts: TokenizerFacts, text: str) -> bool:
    matcher = load_grammar(llguidance.compile_ebnf(grammar, facts), facts)
    ids = [*facts.encode(text), facts.eos_token_ids[0]]
    return matcher.advance(ids) == len(ids)


@pytest.mark.parametrize("seed", range(25))
def test_random_grammars_take_the_texts_of_the_same_regular_expression(seed: int) -> None:
    """Without references, a grammar and a regular expression of one seed are the same."""
    facts = facts_of("byte_level_json")
    pattern = re.compile(GrammarMaker(seed).regular(str, gap=""), re.DOTALL)
    grammar = f"root ::= {GrammarMaker(seed).regular()}"
    fresh = load_grammar(llguidance.compile_ebnf(grammar, facts), facts)
    rng = random.Random(seed)
    texts = ["".join(rng.choices("abc x", k=rng.randint(0, 8))) for _ in range(40)]
    for text in [*texts, *("a" * count for count in range(9))]:
        ids = [*facts.encode(text), facts.eos_token_ids[0]]
        is_taken = fresh.fork().advance(ids) == len(ids)
        assert is_taken == bool(pattern.fullmatch(text)), (grammar, text)


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        ('root ::= "a"{2}', ["aa"], ["a", "aaa"]),
        ('root ::= "ab"{1,2}', ["ab", "abab"], ["", "abb", "ababab"]),
        ('root ::= "a"{2,}', ["aa", "aaaa"], ["a"]),
        ('root ::= "a"{,2} "b"{0}', ["", "aa"], ["aaa", "b"]),
        ("root ::= ..*", ["x", "é\n"], [""]),
        ("root ::= .{2}", ["xy"], ["x", "xyz"]),
        (r"root ::= [a\-z\]]+", ["a-z]"], ["b"]),
        (r'root ::= [^\x00-\x1F"\\] "\""', ['é"'], ['""', '\n"']),
        ("root ::= a-b\na-b ::= [-a] | _c.d\n_c.d ::= [b-]", ["-", "a", "b"], ["c"]),
        ('root ::= "(" root ")" | root root | "x"', ["x", "(xx)x"], ["", "(x"]),
        ('root ::= ("a" | "ab") ("c" | "bc") # "c"\n', ["ac", "abc", "abbc"], ["a", "abcc"]),
        (r'root ::= "\u00e9\U0001F600\t"', ["é😀\t"], ["é😀"]),
    ],
)  # fmt: skip
def test_the_forms_of_ebnf(grammar: str, good: list[str], bad: list[str]) -> None:
    facts = facts_of("byte_level_json")
    assert [text for text in good if not takes(grammar, facts, text)] == []
    assert [text for text in bad if takes(grammar, facts, text)] == []


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ('x ::= "a"', "no rule 'root'"),
        ("root ::= a", "'a' is used and not defined; add a line a ::="),
        ('root ::= "a"\nroot ::= "b"', "'root' is defined twice"),
        ('root ::= ("a"', "A group is not closed here, in line 1"),
        ('root ::= "a")', "No group is open that ends here, in line 1: ')'"),
        ('root ::= "a"\n  | *', "nothing before it to be repeated, in line 2: '*'"),
        ('root ::= "a"{3,2}', "Write a repetition as"),
        ('root ::= "a"{}', "Write a repetition as"),
        ('root ::= "a"{' + "9" * 5000 + "}", "something that is no EBNF, in line 1"),
        ("root ::= [z-a]", "ends before it begins"),
        ("root ::= []", "The class has no characters"),
        (r'root ::= "\q"', "The escape is unknown"),
        (r'root ::= "\ud800"', "stands for no character"),
        ('root ::= "a', "something that is no EBNF, in line 1"),
        ('"a"', "A rule must begin here"),
        ("root ::= " + "(" * 300 + '"a"' + ")" * 300, "More than 200 groups"),
        ('root ::= "a" root', "'root' has no finite text"),
    ],
)
def test_what_is_no_ebnf_is_said(grammar: str, reason: str) -> None:
    with pytest.raises(CannotCompile, match=re.escape(reason)):
        llguidance.compile_ebnf(grammar, facts_of("byte_level_json"))


def test_a_matcher_of_a_users_rules_takes_tokens_without_pythons_lock() -> None:
    """Another thread goes on while the library works: it counts far more milliseconds than there
    are calls."""
    facts = facts_of("byte_level_json")
    grammar = 'root ::= s*\ns ::= s | "a" "a"* | ("a"? s{2,5} "a"*){2,50} | "a"+ s*'
    matcher = load_grammar(llguidance.compile_ebnf(grammar, facts), facts)
    ticks, ended = 0, threading.Event()

    def count() -> None:
        nonlocal ticks
        while not ended.is_set():
            time.sleep(0.001)
            ticks += 1

    counting = threading.Thread(target=count)
    (letter,) = facts.encode("a")
    assert matcher.advance([letter] * 40) == 40
    counting.start()
    begin = time.process_time()
    assert matcher.advance([letter] * 10) == 10
    spent_s = time.process_time() - begin
    ended.set()
    counting.join()
    assert spent_s > 0.1 and ticks > 30, "of some 40 ms each, 10 calls would let it count to 20"
