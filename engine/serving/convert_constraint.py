"""Protocol to `Constraint`: which tokens a submission allows. Errors name field, value and allowed range."""

from chairlift.engine.v1 import engine_service_pb2 as pb
from chairlift.service.engine_protocol import MAX_GRAMMAR_CHARS
from chairlift.service.sampling_fields import SAMPLING
from engine.constraints.constraint import Constraint, HeldBackEnds, Matcher
from engine.errors import InvalidRequest
from engine.serving.checks import check_length, check_parameter, check_vocabulary

MAX_BAD_SEQUENCES = 2 * SAMPLING["bad_words"].rule.max_entries
"""Each bad word makes two: as it is and behind a space."""
MAX_BAD_SEQUENCE_IDS = 4 * SAMPLING["bad_words"].rule.max_entry_bytes
"""A byte has at most one token, unless the tokenizer normalizes a text to a longer one."""


def check_constraint(submission: pb.Submission, vocab_size: int) -> None:
    """Checks allowed tokens, forbidden sequences and the length of the grammar.

    Raises: InvalidRequest: one of them is invalid.
    """
    allowed_ids, sequences = submission.sampling.allowed_token_ids, submission.sampling.bad_sequences
    check_parameter("sampling.allowed_token_ids", SAMPLING["allowed_token_ids"], allowed_ids, vocab_size)
    check_length("sampling.bad_sequences", len(sequences), MAX_BAD_SEQUENCES, "sequences")
    for index, sequence in enumerate(sequences):
        field = f"sampling.bad_sequences[{index}]"
        if not sequence.token_ids:
            raise InvalidRequest(f"{field} has no ids: at least 1 is needed")
        check_length(field, len(sequence.token_ids), MAX_BAD_SEQUENCE_IDS, "ids")
        check_vocabulary(field, max(sequence.token_ids), vocab_size)
    check_length("grammar", len(submission.grammar), MAX_GRAMMAR_CHARS, "characters")


def constraint_from_submission(
    submission: pb.Submission, vocab_size: int, end_token_ids: frozenset[int], matcher: Matcher | None = None
) -> Constraint | None:
    """Makes the constraint of a checked submission, before its `output_ids`; None: unconstrained.

    Args:
        submission: as received.
        vocab_size, end_token_ids: of the model.
        matcher: matcher of its grammar, in its initial state.
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
