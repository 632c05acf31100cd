"""A session against a random engine: handles, streams and commands keep their invariants."""

import random

import pytest

from chairlift.engine.v1 import engine_service_pb2 as pb
from frontend.engine_session import EngineSession, ProtocolViolation
from frontend.errors import EngineUnavailable
from frontend.request_stream import CancelReason


def make_session(**arguments):
    return EngineSession(**{"vocab_size": 10, "step_window": 4, "wake": lambda: None, **arguments})


def submission(max_tokens=100):
    return pb.Submission(stops=pb.TokenStops(max_tokens=max_tokens))


def completion(handle, reason=pb.COMPLETION_REASON_CANCELLED):
    return pb.Completion(handle=handle, reason=reason)


def test_handles_are_free_again_after_completion_only():
    session = make_session()
    first, second = session.submit(submission(), window=4), session.submit(submission(), window=4)
    assert (first.handle, second.handle) == (1, 2)
    first.close(CancelReason.CLIENT)
    assert session.submit(submission(), window=4).handle == 3
    session.deal_step(pb.StepResult(step_seq=1, completions=[completion(1)]))
    assert session.submit(submission(), window=4).handle == 1
    session.check_integrity()


def test_handles_are_free_again_after_rejection():
    session = make_session()
    session.submit(submission(), window=4)
    rejection = pb.Rejection(handle=1, reason=pb.REJECTION_REASON_QUEUE_FULL)
    session.deal_admission(pb.AdmissionResult(rejections=[rejection]))
    assert session.num_open == 0
    assert session.submit(submission(), window=4).handle == 1


def test_ended_session_fails_all_and_takes_nothing():
    session = make_session()
    stream = session.submit(submission(), window=4)
    session.end(EngineUnavailable("gone"))
    assert stream.closed
    with pytest.raises(EngineUnavailable, match="gone"):
        session.submit(submission(), window=4)
    stream.close(CancelReason.CLIENT)
    session.grant(1, 5)
    session.cancel(1, CancelReason.CLIENT)
    assert [command.WhichOneof("command") for command in session.take_commands()] == ["submit"]


@pytest.mark.parametrize("step_seq", [0, 2, 5])
def test_steps_out_of_order_break_the_session(step_seq):
    with pytest.raises(ProtocolViolation, match=f"step {step_seq} came after step 0"):
        make_session().deal_step(pb.StepResult(step_seq=step_seq))


def test_row_may_hold_several_tokens():
    session = make_session()
    one, two = session.submit(submission(), window=4), session.submit(submission(), window=4)
    session.deal_step(
        pb.StepResult(
            step_seq=1, handles=[1, 2], token_counts=[2, 1], token_ids=[5, 6, 7], start_indices=[0, 0],
            first_tokens=[pb.FirstToken(handle=2, num_cached_tokens=16)],
        )
    )  # fmt: skip
    assert (one._token_ids, two._token_ids) == ([5, 6], [7])
    assert (one.num_cached_tokens, two.num_cached_tokens) == (0, 16)


def test_counts_and_epochs_may_be_left_out():
    session = make_session()
    streams = [session.submit(submission(), window=4) for _ in range(2)]
    session.deal_step(pb.StepResult(step_seq=1, handles=[1, 2], token_ids=[5, 6], start_indices=[0, 0]))
    assert [stream._token_ids for stream in streams] == [[5], [6]]


def test_random_engine_leaves_the_invariants_standing():
    rng = random.Random(7)
    session, engine, step_seq, tokens = make_session(), {}, 0, {}
    for _ in range(4000):
        match rng.randrange(5):
            case 0 | 1:
                stream = session.submit(submission(), window=rng.randrange(1, 9))
                assert stream.handle not in engine, "the handle is in use in the engine"
                engine[stream.handle] = stream
                tokens[stream.handle] = 0
            case 2 if engine:
                rng.choice(list(engine.values())).close(rng.choice(list(CancelReason)))
            case 3 if engine:
                step_seq += 1
                handles = rng.sample(list(engine), rng.randrange(len(engine)) + 1)
                step = pb.StepResult(step_seq=step_seq, handles=handles, token_ids=[1] * len(handles))
                for handle in handles:
                    step.start_indices.append(tokens[handle])
                    tokens[handle] += 1
                for handle in rng.sample(list(engine), len(engine) // 2):
                    step.completions.add(
                        handle=handle, reason=pb.COMPLETION_REASON_END_TOKEN, num_output_tokens=tokens[handle]
                    )
                session.deal_step(step)
                for ended in step.completions:
                    assert engine.pop(ended.handle).closed
            case 4:
                session.take_commands()
        session.check_integrity()
        assert session.num_open == len(engine)
