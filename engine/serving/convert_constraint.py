"""Wire to `Constraint`: which tokens a Submission lets its answer go on with. Errors name the field and the numbers."""

from collections.abc import Collection

from chairlift.engine.v1 import engine_service_pb2 as pb
from engine.constraints.constraint import Constraint, HeldBackEnds, Matcher
from engine.errors import InvalidRequest

MAX_BAD_SEQUENCES = 1024
MAX_BAD_SEQUENCE_IDS = 256
MAX_GRAMMAR_CHARS = 1 << 18


def check_constraint(submission: pb.Submission, vocab_size: int) -> None:
    """Checks allowed tokens, forbidden sequences and the length of the grammar.

    Raises: InvalidRequest: which of them cannot be served, and why.
    """
    allowed_ids, sequences = submission.sampling.allowed_token_ids, submission.sampling.bad_sequences
    _check_length("sampling.allowed_token_ids", len(allowed_ids), vocab_size, "ids")
    _check_ids("sampling.allowed_token_ids", allowed_ids, vocab_size)
    _check_length("sampling.bad_sequences", len(sequences), MAX_BAD_SEQUENCES, "sequences")
    for index, sequence in enumerate(sequences):
        field = f"sampling.bad_sequences[{index}]"
        if not sequence.token_ids:
            raise InvalidRequest(f"{field} has no ids: at least 1 is needed")
        _check_length(field, len(sequence.token_ids), MAX_BAD_SEQUENCE_IDS, "ids")
        _check_ids(field, sequence.token_ids, vocab_size)
    _check_length("grammar", len(submission.grammar), MAX_GRAMMAR_CHARS, "characters")


def constraint_from_submission(
    submission: pb.Submission, vocab_size: int, end_token_ids: frozenset[int], matcher: Matcher | None = None
) -> Constraint | None:
    """The constraint of a checked submission, which knows its `output_ids` are still to come; None if there is none.

    Args:
        submission: as received.
        vocab_size, end_token_ids: of the model.
        matcher: of its grammar, at the beginning.
    """
    sampling, stops = submission.sampling, submission.stops
    if not (sampling.allowed_token_ids or sampling.bad_sequences or matcher is not None):
        return None
    end_ids = {token_id for token_id in end_token_ids if token_id < vocab_size}
    ends = HeldBackEnds(
        token_ids=tuple(end_ids.union(stops.stop_token_ids)),
        min_tokens=stops.min_tokens,
        always=tuple(end_ids) if stops.ignore_end_token else (),
    )
    return Constraint(
        vocab_size,
        allowed_ids=tuple(sampling.allowed_token_ids),
        bad_sequences=[tuple(sequence.token_ids) for sequence in sampling.bad_sequences],
        matcher=matcher,
        ends=ends if matcher is not None else None,
    )


def _check_ids(field: str, token_ids: Collection[int], vocab_size: int) -> None:
    largest_id = max(token_ids, default=0)
    if largest_id >= vocab_size:
        raise InvalidRequest(f"{field} contains token id {largest_id}, the vocabulary has {vocab_size}")


def _check_length(field: str, length: int, most: int, unit: str) -> None:
    if length > most:
        raise InvalidRequest(f"{field} has {length} {unit}, at most {most} are served")
