"""Compiles grammars to matchers on separate threads, so that neither the event loop nor the step loop waits."""

import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from engine.constraints.constraint import Matcher
from engine.constraints.token_bits import num_words
from engine.errors import InvalidRequest, QueueFull
from engine.model.tokenizer_files import TokenizerFiles
from engine.serving.thread_priority import lower_priority

if TYPE_CHECKING:
    from engine.constraints.grammar import GrammarMatcher, GrammarTokenizer

NUM_THREADS = 2
# llguidance recurses into nested rules, and a stack overflow ends the process: 3,000 rules overflow 8 MB, while the
# 22,000 that a grammar of the maximum length can have fit here. Only the used part is committed. Masks need no such
# stack.
STACK_BYTES = 512 << 20
# Compiled grammars in the cache. Copies of a grammar share the lexer states that the library adds while it runs, up to
# `max_lexer_states` or 100 MB, after which the grammar is compiled again. The cache is therefore small; the median
# schema compiles in half a millisecond.
MAX_CACHED_GRAMMARS = 32
MAX_CACHED_CHARS = 4 << 20

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class MatcherCompiler:
    """Compiles the grammars of one model."""

    def __init__(self, tokenizer: TokenizerFiles, vocab_size: int, end_token_ids: frozenset[int]) -> None:
        """Starts no thread and reads nothing yet.

        Args:
            tokenizer: tokenizer of the model.
            vocab_size: vocabulary of the model, which may be larger than the tokenizer's.
            end_token_ids: end tokens of the model.
        """
        self._files = dict(tokenizer.files)
        self._vocab_size = vocab_size
        self._end_token_ids = end_token_ids
        self._threads = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="grammar", initializer=lower_priority)
        self._lock = threading.Lock()
        self._tokenizer_lock = threading.Lock()
        self._tokenizer: GrammarTokenizer | None = None
        self._refusal = ""  # why the tokenizer cannot be used
        self._cache: OrderedDict[str, GrammarMatcher] = OrderedDict()  # least recently used first
        self._num_cached_chars = 0

    def prepare(self) -> None:
        """Reads the tokenizer, if there is one, before the engine serves.

        The library holds the GIL meanwhile (0.6 s for 150,000 tokens on an idle core, 2.1 s at load 12), so that no
        heartbeats are sent.
        """
        if "tokenizer.json" in self._files:
            try:
                error = self.run(self.load_tokenizer).exception()
            except QueueFull as full:  # the first grammar retries
                error = full
            if error is not None:
                _log.warning("Structured output is not available: %s", error)

    def compile(self, grammar: str, build: Callable[[Matcher], _T]) -> Future[_T]:
        """Queues a grammar.

        Args:
            grammar: in llguidance's syntax.
            build: called on the thread with a matcher at the start of the grammar.
        Returns: a future of the result of `build`; InvalidRequest if the grammar cannot be compiled.
        Raises: QueueFull: the system has no thread or no memory for its stack.
        """
        return self.run(lambda: build(self._matcher(grammar)))

    def close(self) -> None:
        """Drops queued grammars; those being compiled finish in the background."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def run(self, work: Callable[[], _T]) -> Future[_T]:
        """Queues work on a thread with a large stack.

        Raises: QueueFull: see `compile`.
        """
        with self._lock:
            before = threading.stack_size(STACK_BYTES)  # for threads started from now on
            try:
                return self._threads.submit(work)
            except RuntimeError as error:
                raise QueueFull(f"grammar: cannot be compiled now, retry later: {error}") from error
            finally:
                threading.stack_size(before)

    def _matcher(self, grammar: str) -> "GrammarMatcher":
        with self._lock:
            if (cached := self._cache.get(grammar)) is not None:
                self._cache.move_to_end(grammar)
        if cached is not None:
            if not self._is_used_up(copy := cached.copy()):
                return copy
            with self._lock:
                if self._cache.get(grammar) is cached:
                    del self._cache[grammar]
                    self._num_cached_chars -= len(grammar)
        compiled = self._compile(grammar)
        copy = compiled.copy()
        with self._lock:
            if grammar not in self._cache:
                self._cache[grammar] = compiled
                self._num_cached_chars += len(grammar)
            while len(self._cache) > MAX_CACHED_GRAMMARS or self._num_cached_chars > MAX_CACHED_CHARS:
                evicted, _ = self._cache.popitem(last=False)
                self._num_cached_chars -= len(evicted)
        return copy

    def _compile(self, grammar: str) -> "GrammarMatcher":
        from engine.constraints.grammar import GrammarMatcher

        matcher = GrammarMatcher.compile(grammar, self.load_tokenizer())
        # The first mask takes a millisecond and is shared by all copies.
        if self._is_used_up(matcher):
            raise InvalidRequest(matcher.error)
        return matcher

    def _is_used_up(self, matcher: "GrammarMatcher") -> bool:
        """Whether the first mask cannot be computed."""
        matcher.fill(np.zeros(num_words(self._vocab_size), dtype=np.int32))
        return bool(matcher.error)

    def load_tokenizer(self) -> "GrammarTokenizer":
        """Returns the tokenizer, read on first use; called on a thread of `run`.

        Raises: InvalidRequest: there is none, or it cannot be used.
        """
        from engine.constraints.grammar import GrammarTokenizer

        with self._tokenizer_lock:
            if self._tokenizer is None:
                if "tokenizer.json" not in self._files:
                    raise InvalidRequest("grammar: this engine has no tokenizer and serves token ids only")
                if self._refusal:
                    raise InvalidRequest(self._refusal)
                started_s = time.perf_counter()
                data = self._files["tokenizer.json"]
                try:
                    self._tokenizer = GrammarTokenizer(data, self._vocab_size, self._end_token_ids)
                except InvalidRequest as error:
                    self._refusal = str(error)  # do not read it again: that would block the process
                    raise
                _log.info("Reading the tokenizer for grammars took %.2f seconds", time.perf_counter() - started_s)
            return self._tokenizer
