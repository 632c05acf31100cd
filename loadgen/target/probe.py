"""Requests a few tokens before the run: a server may describe itself and still be unable to answer."""

import asyncio
from typing import Any

import numpy as np

from loadgen.errors import TargetError
from loadgen.prompts.token_ids import Vocabulary
from loadgen.record import ABSENT
from loadgen.target.base import PlannedRequest, Target, TargetFacts, TargetSpec

PROBE_TIMEOUT_S = 10.0
"""Time for a server to describe its model."""
FIRST_ANSWER_TIMEOUT_S = 120.0
"""Time to generate the first few tokens: the server may compile its kernels first."""
NUM_PROBE_TOKENS = 4
"""Tokens of a probe's answer."""
_NUM_INPUT_TOKENS = 8


class Tally:
    """A Sink that counts tokens."""

    def __init__(self) -> None:
        self.num_input_tokens = self.num_cached_tokens = self.num_counted_tokens = ABSENT
        self.num_tokens = 0

    def sent(self) -> None:
        """Does nothing: times are not measured."""

    def started(self, num_input_tokens: int, num_cached_tokens: int) -> None:
        """See Sink."""
        self.num_input_tokens, self.num_cached_tokens = num_input_tokens, num_cached_tokens

    def tokens(self, count: int) -> None:
        """See Sink."""
        self.num_tokens += count

    def finished(self, num_output_tokens: int, **times: int) -> None:  # noqa: ARG002 - times are not measured
        """See Sink."""
        self.num_counted_tokens = num_output_tokens


def probe_request(spec: TargetSpec, facts: TargetFacts) -> PlannedRequest:
    """Returns a request with a prompt of 8 tokens (or words) and an answer of 4."""
    if spec.prompt_mode == "text":
        return PlannedRequest(0, None, " ".join(["the"] * _NUM_INPUT_TOKENS), NUM_PROBE_TOKENS)
    ids = Vocabulary.of(facts.vocab_size, facts.special_ids).ids
    return PlannedRequest(0, np.resize(ids[: 4 * _NUM_INPUT_TOKENS], _NUM_INPUT_TOKENS), None, NUM_PROBE_TOKENS)


async def probe_answer(target: Target, prepared: Any, spec: TargetSpec) -> None:
    """Runs the prepared `probe_request` and checks the answer.

    Raises:
        RequestFailedError: the server refused it or ended it early.
        TargetError: it does not answer, counts the prompt differently, or does not keep the length of answers.
    """
    tally = Tally()
    try:
        async with asyncio.timeout(FIRST_ANSWER_TIMEOUT_S):
            await target.send(prepared, tally)
    except TimeoutError:
        raise TargetError(
            f"{spec.url} took a request of {NUM_PROBE_TOKENS} tokens and did not answer it within "
            f"{FIRST_ANSWER_TIMEOUT_S:g} s: look at the server's log"
        ) from None
    counted = tally.num_tokens if tally.num_counted_tokens == ABSENT else tally.num_counted_tokens
    if counted == 0 or (spec.ignore_eos and counted < NUM_PROBE_TOKENS):
        hint = "; --no-ignore-eos takes answers as long as they come" if counted else ""
        raise TargetError(
            f"{spec.url} was asked for exactly {NUM_PROBE_TOKENS} tokens and sent {counted}: answers would not have "
            f"the lengths of the workload{hint}"
        )
    is_odd = spec.prompt_mode == "ids" and tally.num_input_tokens > _NUM_INPUT_TOKENS + 1  # a start token may be added
    if is_odd:
        raise TargetError(
            f"{spec.url} counted {tally.num_input_tokens} tokens in a prompt of {_NUM_INPUT_TOKENS} token ids: it does "
            "not take ids as they are; use --prompt-mode text"
        )


def refusal(spec: TargetSpec, error: object) -> TargetError:
    """Returns the error for a server that describes itself and refuses the probe."""
    return TargetError(f"{spec.url} refused a request of {NUM_PROBE_TOKENS} tokens: {error}")
