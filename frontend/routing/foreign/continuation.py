"""What an engine of another project must generate for a submission, which may continue an answer. Pure.

Such an engine takes a prompt and starts an answer. There are two ways to continue one:

- **Appended**: the tokens so far follow the prompt, and the limits are what is left of them. Penalties on tokens of the
  answer become biases, because the engine takes these tokens for prompt.
- **Replayed**, with a grammar: the engine must read the answer from its beginning. It generates all of it again, and
  the tokens that are known are compared and dropped.
"""

import hashlib
from array import array
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from chairlift.engine.v1 import engine_service_pb2 as pb
from chairlift.service.engine_protocol import BYTES_PER_TOKEN_ID
from frontend.routing import wire

MAX_BIAS = 100.0


class UnsupportedError(Exception):
    """An engine of this kind cannot serve the request; the message names the parameter."""


@dataclass(frozen=True, slots=True)
class Continuation:
    """A request for an engine without memory of its beginning.

    Attributes:
        prompt_ids: tokens to read.
        replayed_ids: the first tokens that the engine must generate; empty unless the answer is replayed.
        num_known: tokens of the answer so far, in `prompt_ids` or replayed.
        max_tokens, min_tokens: limits of what the engine generates.
        logit_bias: values by token id.
        seed: of the engine's random numbers.
    """

    prompt_ids: Sequence[int]
    replayed_ids: Sequence[int]
    num_known: int
    max_tokens: int
    min_tokens: int
    logit_bias: dict[int, float]
    seed: int


def continuation_of(submission: pb.Submission) -> Continuation:
    """Returns what to ask for. The submission's answer must not have ended, see `finished_reason`."""
    sampling, stops = submission.sampling, submission.stops
    prompt_ids, output_ids = wire.ids_from_bytes(submission.prompt_ids), wire.ids_from_bytes(submission.output_ids)
    bias = dict(zip(sampling.bias_ids, sampling.bias_values, strict=True))
    if submission.grammar:
        return Continuation(
            prompt_ids, output_ids, len(output_ids), stops.max_tokens, stops.min_tokens, bias, sampling.seed
        )
    if sampling.presence_penalty or sampling.frequency_penalty:
        for token_id, num_times in Counter(output_ids).items():
            penalty = sampling.presence_penalty + sampling.frequency_penalty * num_times
            bias[token_id] = min(max(bias.get(token_id, 0.0) - penalty, -MAX_BIAS), MAX_BIAS)
    num_known = len(output_ids)
    return Continuation(
        prompt_ids + output_ids,
        (),
        num_known,
        stops.max_tokens - num_known,
        max(stops.min_tokens - num_known, 0),
        bias,
        _seed_at(sampling.seed, num_known),
    )


def finished_reason(
    submission: pb.Submission, end_token_ids: Sequence[int], max_model_len: int
) -> "pb.CompletionReason | None":
    """Returns why an answer has already ended; None if it has not. An engine may be lost between the two messages."""
    stops = submission.stops
    num_prompt = len(submission.prompt_ids) // BYTES_PER_TOKEN_ID
    num_known = len(submission.output_ids) // BYTES_PER_TOKEN_ID
    if num_known and num_known >= stops.min_tokens:
        last = wire.ids_from_bytes(submission.output_ids[-BYTES_PER_TOKEN_ID:])[0]
        if last in stops.stop_token_ids:
            return pb.COMPLETION_REASON_STOP_TOKEN
        if last in end_token_ids and not stops.ignore_end_token:
            return pb.COMPLETION_REASON_END_TOKEN
    if num_known >= stops.max_tokens:
        return pb.COMPLETION_REASON_MAX_TOKENS
    if num_known and num_prompt + num_known >= max_model_len:
        return pb.COMPLETION_REASON_CONTEXT_FULL
    return None


def _seed_at(seed: int, index: int) -> int:
    """Returns the seed of an answer's rest: the engine would otherwise draw the beginning's random numbers again."""
    if not index:
        return seed
    digest = hashlib.sha256(array("Q", (seed, index)).tobytes()).digest()
    return int.from_bytes(digest[:8], "little")
