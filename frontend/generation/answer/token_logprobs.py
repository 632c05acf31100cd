"""Converts log-probabilities to the columns of the public proto."""

from collections.abc import Sequence

from chairlift.v1 import generation_service_pb2 as pb
from frontend.routing.logprobs import LogprobBatch
from frontend.text.tokenizer import Tokenizer


def token_logprobs(batch: LogprobBatch, token_ids: Sequence[int], tokenizer: Tokenizer) -> pb.TokenLogprobs:
    """Returns the columns for some tokens.

    Args:
        token_ids: the chosen tokens, one for each entry of `batch`.
    """
    return pb.TokenLogprobs(
        chosen=batch.chosen,
        top_width=batch.top_width,
        top_ids=batch.top_ids,
        top_values=batch.top_values,
        chosen_bytes=[tokenizer.token_bytes(token_id) for token_id in token_ids],
    )
