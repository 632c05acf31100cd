"""Checks prompts of token ids in slices, because a million ids would block the event loop."""

from array import array
from collections.abc import Sequence

from chairlift.v1 import generation_service_pb2 as pb
from frontend.errors import RequestTooLong
from frontend.request.checks import check_token_ids
from frontend.request.prompt_options import Truncation
from frontend.request.request import TokenPrompt
from frontend.slices import Sliced, pieces
from frontend.text.served_model import ServedModel


def token_prompt(
    spec: pb.GenerationSpec, model: ServedModel, truncation: Truncation | None = None
) -> Sliced[TokenPrompt | None]:
    """Returns the prompt of a request with token ids; None without token ids.

    Args:
        truncation: which ids to keep; None for all.

    Raises:
        InvalidRequest: an id is not in the vocabulary, or there are too many.
    """
    given: Sequence[int] = spec.token_ids.ids
    if not given:
        return None
    if truncation is not None:
        given = truncation.of(given)
    field = "spec.token_ids"
    if len(given) > model.max_model_len:
        raise RequestTooLong(
            f"This model's maximum context length is {model.max_model_len} tokens. The prompt has {len(given)} tokens",
            field="spec.prompt",
        )
    return TokenPrompt((yield from checked_ids(field, given, model)))


def checked_ids(field: str, given: Sequence[int], model: ServedModel) -> "Sliced[array[int]]":
    """Checks token ids against the vocabulary.

    Raises:
        InvalidRequest: an id is not in the vocabulary.
    """
    ids = array("I")
    for piece in pieces(given):
        check_token_ids(field, piece, model.vocab_size)
        ids.extend(piece)
        yield
    return ids
