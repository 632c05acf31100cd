"""Runs a grammar as the engine will, to refuse it before the first token if it is too expensive.

A grammar that compiles may still be unusable: most of the library's work and limits apply to the following steps. A few
answers are therefore drawn here, mainly from tokens that advance the grammar's structure. Runs in the worker.
"""

import random
import time

from llguidance import LLMatcher, LLTokenizer

from chairlift.service.structured.output_constraint import ConstraintError
from chairlift.service.structured.parser_limits import parser_limits

_NUM_WALKS = 4
_MAX_STEPS = 128  # of one walk: a few milliseconds for most grammars
_MAX_STEP_S = 0.25  # CPU time; longer steps would delay the engine's other answers
_MAX_TRIAL_S = 1.0  # CPU time of all walks; a step with the longest regex takes 10 ms
_STRUCTURE = ('"', ",", ":", "{", "[", "]", "}", "\n", " ", "1", "a", "true", "null", "(", ")", "<", ">")
_SEED = 20


class Trial:
    """Tries grammars with the vocabulary of one model.

    Args:
        tokenizer: the model's tokenizer.
    """

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer
        texts = (tokenizer.tokenize_str(text) for text in _STRUCTURE)
        self._structure = list(dict.fromkeys(token_ids[0] for token_ids in texts if len(token_ids) == 1))

    def run(self, grammar: str) -> None:
        """Compiles a grammar and draws some answers.

        Args:
            grammar: in the library's format.
        Raises: ConstraintError: it does not compile, no text satisfies it, or it exceeds a limit.
        """
        compiled = LLMatcher(self._tokenizer, grammar, log_level=0, limits=parser_limits())
        if compiled.is_error():
            raise ConstraintError(_error_message(compiled))
        compiled.compute_bitmask()
        if compiled.is_error():
            raise ConstraintError(f"no text satisfies it ({_error_message(compiled)})")
        rng = random.Random(_SEED)
        until_s = time.process_time() + _MAX_TRIAL_S
        for _ in range(_NUM_WALKS):
            self._walk(compiled.deep_copy(), rng, until_s)

    def _walk(self, matcher: LLMatcher, rng: random.Random, until_s: float) -> None:
        for _ in range(_MAX_STEPS):
            began_s = time.process_time()
            if matcher.is_stopped() or began_s > until_s:
                break
            matcher.consume_token(self._choose(matcher.compute_bitmask(), rng))
            step_s = time.process_time() - began_s
            if step_s > _MAX_STEP_S:
                raise ConstraintError(f"one step under it takes {step_s:.1f} s, more than {_MAX_STEP_S} s")
        if matcher.is_error():
            raise ConstraintError(f"it is too expensive to run: {_error_message(matcher)}")

    def _choose(self, mask: bytes, rng: random.Random) -> int:
        """Returns an allowed token, usually one that starts or ends a part of the answer."""
        if rng.random() < 0.8:
            allowed = [token_id for token_id in self._structure if mask[token_id >> 3] >> (token_id & 7) & 1]
            if allowed:
                return rng.choice(allowed)
        bits = int.from_bytes(mask, "little")
        later = bits >> (start := rng.randrange(8 * len(mask)))
        bits, offset = (later, start) if later else (bits, 0)
        return offset + (bits & -bits).bit_length() - 1


def _error_message(matcher: LLMatcher) -> str:
    """Returns the library's error without its details for developers."""
    text = matcher.get_error().partition("<state>")[0].replace("<non-verbose/>", "")
    return text.strip()[:1000]
