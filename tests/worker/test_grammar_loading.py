"""Grammars on the worker: loaded beside the steps, and reported whether they could be or not."""

import queue
import threading
from pathlib import Path

import pytest

from radixrt.constrained.backends import llguidance
from radixrt.constrained.grammar import Grammar
from radixrt.constrained.matcher import Matcher
from radixrt.constrained.tokenizer_facts import TokenizerFacts
from radixrt.messages.grammars import DropGrammar, GrammarLoaded, LoadGrammar
from radixrt.worker.sampling import grammar_loader
from radixrt.worker.sampling.grammar_loader import RENEW_AFTER_S, GrammarLoader
from tests.checkpoints.tiny_tokenizers import save_byte_level

VOCAB_SIZE, EOS = 420, (1,)


def test_each_load_is_answered_with_the_matcher_ready_or_the_reason_why_not(tmp_path: Path) -> None:
    file = save_byte_level(tmp_path) / "tokenizer.json"
    facts = TokenizerFacts.load(file, vocab_size=VOCAB_SIZE, eos_token_ids=EOS)
    good = llguidance.compile_regex("a+", facts)
    bad = [Grammar.compiled("fsm", b"\0" * 100), Grammar.compiled("llguidance", b"{}")]
    answers: queue.SimpleQueue[GrammarLoaded] = queue.SimpleQueue()
    loader = GrammarLoader(file, VOCAB_SIZE, EOS, answers.put)
    for grammar in (*bad, good):
        loader.order(LoadGrammar(grammar))
    errors = {answer.key: answer.error for answer in (answers.get(timeout=60) for _ in range(3))}
    assert errors.keys() == {good.key, bad[0].key, bad[1].key}
    assert errors[good.key] is None
    assert errors[bad[0].key] == "The grammar is no finite-state machine."
    assert errors[bad[1].key]
    loader.use(good.key)
    for grammar in (*bad, good):
        loader.order(DropGrammar(grammar.key))


def test_the_worker_knows_how_long_a_grammar_has_been_loading(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By this its heartbeat ends when a grammar does not come to an end."""
    goes_on = threading.Event()
    monkeypatch.setattr(grammar_loader, "load_grammar", lambda *_: goes_on.wait(20))
    file = save_byte_level(tmp_path) / "tokenizer.json"
    answers: queue.SimpleQueue[GrammarLoaded] = queue.SimpleQueue()
    loader = GrammarLoader(file, VOCAB_SIZE, EOS, answers.put)
    assert loader.seconds_at_work() == 0.0
    loader.order(LoadGrammar(Grammar.compiled("fsm", b"endless")))
    while not (first := loader.seconds_at_work()):
        pass
    assert loader.seconds_at_work() > first
    goes_on.set()
    answers.get(timeout=20)
    assert loader.seconds_at_work() == 0.0


def test_a_grammar_whose_masks_were_slow_is_loaded_again_when_nobody_uses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All copies of its matcher share the states of one lexer, some 10 MB a second of slow
    masks."""
    file = save_byte_level(tmp_path) / "tokenizer.json"
    facts = TokenizerFacts.load(file, vocab_size=VOCAB_SIZE, eos_token_ids=EOS)
    grammar = llguidance.compile_regex("a+", facts)
    loads: queue.SimpleQueue[Grammar] = queue.SimpleQueue()
    load = grammar_loader.load_grammar

    def counted(grammar: Grammar, facts: TokenizerFacts) -> Matcher:
        loads.put(grammar)
        return load(grammar, facts)

    monkeypatch.setattr(grammar_loader, "load_grammar", counted)
    answers: queue.SimpleQueue[GrammarLoaded] = queue.SimpleQueue()
    loader = GrammarLoader(file, VOCAB_SIZE, EOS, answers.put)
    loader.order(LoadGrammar(grammar))
    assert answers.get(timeout=60).error is None and loads.get(timeout=1)
    half = RENEW_AFTER_S / 2
    for _ in range(3):  # quick masks never count
        loader.release(loader.use(grammar.key), 0.0)
    first, second = loader.use(grammar.key), loader.use(grammar.key)
    matcher = first.matcher.fork()
    loader.release(first, 3 * half)
    assert loads.empty()  # the other one is used still
    loader.release(second, 0.0)
    assert loads.get(timeout=20) is grammar
    assert matcher.advance([VOCAB_SIZE - 1]) == 0  # the old copy works on
    for slow_s in (half, half, half / 2):
        loader.release(loader.use(grammar.key), slow_s)
    assert loads.get(timeout=20) is grammar and loads.empty()
    stale = loader.use(grammar.key)
    loader.order(DropGrammar(grammar.key))
    loader.order(LoadGrammar(grammar))
    assert answers.get(timeout=60).error is None and loads.get(timeout=20)
    loader.release(stale, 3 * half)  # of the grammar that was dropped
    assert loads.empty()
    loader.release(loader.use(grammar.key), 3 * half)
    assert loads.get(timeout=20) is grammar
