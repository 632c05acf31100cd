"""Grammars on the demo model's tokenizer, against the strings they describe."""

import json
import os
import random
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import pytest
from llguidance._lib import LLParserLimits
from tokenizers import Tokenizer

from engine.constraints.grammar import GrammarMatcher, GrammarTokenizer
from engine.constraints.token_bits import num_words
from engine.demo import MODEL_DIR
from engine.errors import InvalidRequest
from engine.model.tokenizer_files import TokenizerFiles
from engine.serving.matcher_compiler import MAX_CACHED_GRAMMARS, MatcherCompiler
from tests.hang import HANG_S

VOCAB_SIZE, END_ID = 3072, 1
FILES = TokenizerFiles.from_dir(MODEL_DIR)
TEXT = Tokenizer.from_file(str(MODEL_DIR / "tokenizer.json"))


@pytest.fixture(scope="module")
def tokenizer():
    return GrammarTokenizer(dict(FILES.files)["tokenizer.json"], VOCAB_SIZE, {END_ID})


@pytest.fixture
def compiler():
    compiler = MatcherCompiler(FILES, VOCAB_SIZE, frozenset({END_ID}))
    yield compiler
    compiler.close()


def allowed(matcher, vocab_size=VOCAB_SIZE):
    words = np.full(num_words(vocab_size), -1, dtype=np.int32)
    matcher.fill(words)
    return set(np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist())


def test_whatever_is_drawn_keeps_to_the_grammar(tokenizer):
    """Draws allowed tokens at random; the end token must be allowed exactly where the text is complete."""
    complete = {"yes", "no", "not yet", "yesterday"}
    rng = random.Random(0)
    seen = set()
    for _ in range(60):
        matcher = GrammarMatcher.compile('start: "yes" | "no" | "not yet" | "yesterday"', tokenizer)
        output = []
        while True:
            drawable = allowed(matcher)
            text = TEXT.decode(output)
            assert (END_ID in drawable) == (text in complete)
            for token_id in drawable - {END_ID}:
                longer = TEXT.decode([*output, token_id])
                assert any(word.startswith(longer) for word in complete), longer
            token_id = rng.choice(sorted(drawable))
            matcher.accept([token_id])
            assert matcher.error == ""
            if token_id == END_ID:
                seen.add(text)
                break
            output.append(token_id)
    assert seen == complete


def test_no_grammar_allows_ids_that_no_token_has(tokenizer):
    larger = GrammarTokenizer(dict(FILES.files)["tokenizer.json"], 4001, {END_ID})
    anything = "start: /(.|\\n)*/"
    narrow = allowed(GrammarMatcher.compile(anything, tokenizer))
    assert len(narrow) > 2500
    assert allowed(GrammarMatcher.compile(anything, larger), 4001) == narrow


def test_every_end_token_of_the_model_ends_a_complete_answer():
    tokenizer = GrammarTokenizer(dict(FILES.files)["tokenizer.json"], VOCAB_SIZE, {1, 2})
    matcher = GrammarMatcher.compile('start: "a"?', tokenizer)
    assert {1, 2} < allowed(matcher)
    other = matcher.copy()
    other.accept([2])
    assert (other.error, allowed(matcher)) == ("", allowed(GrammarMatcher.compile('start: "a"?', tokenizer)))


def test_end_tokens_beyond_the_vocabulary_are_never_drawn_and_cost_no_grammar():
    """A generation_config.json may name more than the model has."""
    tokenizer = GrammarTokenizer(dict(FILES.files)["tokenizer.json"], VOCAB_SIZE, {END_ID, VOCAB_SIZE + 1000})
    matcher = GrammarMatcher.compile('start: "a"?', tokenizer)
    assert END_ID in allowed(matcher)


def test_a_copy_goes_its_own_way(tokenizer):
    matcher = GrammarMatcher.compile('start: "ab" | "cd"', tokenizer)
    beginning = allowed(matcher)
    copy = matcher.copy()
    copy.accept(TEXT.encode("a", add_special_tokens=False).ids)
    assert allowed(copy) != beginning
    assert allowed(matcher) == beginning


def test_a_token_outside_the_grammar_is_a_permanent_error(tokenizer):
    matcher = GrammarMatcher.compile('start: "a"', tokenizer)
    matcher.accept(TEXT.encode("b", add_special_tokens=False).ids)
    assert matcher.error.startswith("grammar: ")
    assert "<state>" not in matcher.error


@pytest.mark.parametrize(
    ("grammar", "message"),
    [
        ("start: foo", 'unknown name: "foo"'),
        ("start: /(a/", "unclosed group"),
        ("{", "EOF while parsing"),
        ('{"grammars": []}', "empty grammars"),
        (json.dumps({"grammars": [{"json_schema": {"type": "nonsense"}}]}), "nonsense"),
        ("start: " + " | ".join(f'"{i}"' for i in range(60_000)), "number of symbols"),
    ],
)
def test_a_bad_grammar_is_rejected_with_the_error_of_the_library(tokenizer, grammar, message):
    with pytest.raises(InvalidRequest, match=r"^grammar: ") as refused:
        GrammarMatcher.compile(grammar, tokenizer)
    assert message in str(refused.value)
    assert len(str(refused.value)) < 1000


_CHAIN = """
from engine.demo import MODEL_DIR
from engine.serving.matcher_compiler import MatcherCompiler
from engine.model.tokenizer_files import TokenizerFiles

rules = [f"r{i}: r{i + 1}" for i in range(15_000)]
grammar = "\\n".join(["start: r0", *rules, 'r15000: "x"'])
assert len(grammar) < 1 << 18
compiler = MatcherCompiler(TokenizerFiles.from_dir(MODEL_DIR), 3072, frozenset({1}))
compiler.compile(grammar, lambda matcher: matcher).result()
"""


def test_rules_that_lead_to_rules_do_not_end_the_process():
    """In a process of its own, as it would take the tests along."""
    assert subprocess.run([sys.executable, "-c", _CHAIN], timeout=HANG_S, check=False).returncode == 0


@pytest.mark.parametrize(
    ("data", "vocab_size", "ends", "message"),
    [
        (b"{}", VOCAB_SIZE, {1}, "tokenizer cannot be used"),
        (dict(FILES.files)["tokenizer.json"], VOCAB_SIZE - 1, {1}, "3071 vs 3072"),
        (dict(FILES.files)["tokenizer.json"], VOCAB_SIZE, set(), "no end token"),
    ],
)
def test_a_tokenizer_without_grammar_support_is_an_error(data, vocab_size, ends, message):
    with pytest.raises(InvalidRequest, match=message):
        GrammarTokenizer(data, vocab_size, ends)


def test_the_compiler_gives_each_answer_a_matcher_of_its_own_and_compiles_once(compiler, monkeypatch):
    compiled = []
    compile_ = GrammarMatcher.compile
    monkeypatch.setattr(
        GrammarMatcher, "compile", lambda grammar, tokenizer: compiled.append(grammar) or compile_(grammar, tokenizer)
    )
    letter = set(TEXT.encode("a", add_special_tokens=False).ids)
    for _ in range(3):
        matcher = compiler.compile('start: "a"', lambda matcher: matcher).result()
        assert allowed(matcher) == letter
        matcher.accept(list(letter))
        assert allowed(matcher) == {END_ID}
    assert compiled == ['start: "a"']


def test_a_grammar_that_one_answer_has_used_up_still_serves_the_next(compiler, monkeypatch):
    """What the library learns of a grammar is shared by all its answers, and bounded."""
    monkeypatch.setattr("engine.constraints.grammar.parser_limits", lambda: LLParserLimits(max_lexer_states=3000))
    grammar, rng = r"start: /(.*[aeiou].{20})+z/", random.Random(1)
    greedy, neighbour = (compiler.compile(grammar, lambda matcher: matcher).result() for _ in range(2))
    beginning = allowed(neighbour)
    for _ in range(400):
        if drawable := sorted(allowed(greedy) - {END_ID}):
            greedy.accept([rng.choice(drawable)])
    assert "too many states" in greedy.error
    assert allowed(compiler.compile(grammar, lambda matcher: matcher).result()) == beginning


def test_the_least_recently_used_grammars_are_forgotten(compiler, monkeypatch):
    compiled = []
    compile_ = GrammarMatcher.compile
    monkeypatch.setattr(
        GrammarMatcher, "compile", lambda grammar, tokenizer: compiled.append(grammar) or compile_(grammar, tokenizer)
    )
    grammars = [f'start: "{i}"' for i in range(MAX_CACHED_GRAMMARS + 1)]
    for grammar in [*grammars[:-1], grammars[0], grammars[-1]]:
        compiler.compile(grammar, lambda matcher: matcher).result()
    compiled.clear()
    compiler.compile(grammars[0], lambda matcher: matcher).result()
    compiler.compile(grammars[1], lambda matcher: matcher).result()
    assert compiled == [grammars[1]]


def test_a_rejected_grammar_does_not_change_the_compiler(compiler):
    assert isinstance(compiler.compile("start: foo", lambda matcher: matcher).exception(), InvalidRequest)
    assert compiler.compile('start: "a"', allowed).result()


def test_threads_may_ask_at_once(compiler):
    with ThreadPoolExecutor(8) as callers:
        ask = partial(compiler.compile, build=allowed)
        futures = list(callers.map(ask, [f'start: "{i % 5}"' for i in range(100)]))
    alone = [compiler.compile(f'start: "{i}"', allowed).result() for i in range(5)]
    assert [future.result() for future in futures] == [alone[i % 5] for i in range(100)]


def test_an_engine_without_a_tokenizer_serves_no_grammar():
    compiler = MatcherCompiler(TokenizerFiles(()), VOCAB_SIZE, frozenset({END_ID}))
    with pytest.raises(InvalidRequest, match="no tokenizer"):
        compiler.compile('start: "a"', lambda matcher: matcher).result()
    compiler.close()


def test_once_prepared_no_grammar_reads_the_tokenizer(compiler, monkeypatch):
    compiler.prepare()
    monkeypatch.setattr("engine.constraints.grammar.grammar_tokenizer", None)
    assert compiler.compile('start: "a"', allowed).result()


def test_an_unusable_tokenizer_is_read_once_and_logged(caplog):
    compiler = MatcherCompiler(TokenizerFiles((("tokenizer.json", b"{}"),)), VOCAB_SIZE, frozenset({END_ID}))
    compiler.prepare()
    assert "Structured output is not available: grammar: this model's tokenizer cannot be used" in caplog.text
    compiler._files["tokenizer.json"] = dict(FILES.files)["tokenizer.json"]  # which nobody reads
    with pytest.raises(InvalidRequest, match="cannot be used"):
        compiler.compile('start: "a"', lambda matcher: matcher).result()
    compiler.close()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere threads have no priority of their own")
def test_compiling_yields_to_the_steps(compiler):
    def priority(_):
        return os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    assert compiler.compile('start: "a"', priority).result(60) == min(priority(None) + 10, 19)
    assert compiler.compile('start: "b"', priority).result(60) > priority(None)
