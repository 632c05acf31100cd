"""A session against a random engine: handles, streams and commands keep their invariants."""

import random

import pytest

from chairlift.engine.v1 import engine_service_pb2 as pb
from frontend.errors import EngineFault, EngineUnavailable
from frontend.routing.pending import PendingRequest
from frontend.routing.session import EngineSession, ProtocolViolation
from frontend.routing.stream import CancelReason


def make_session(**arguments):
    defaults = {"vocab_size": 10, "step_window": 4, "wake": lambda: None, "give_back": fail}
    return EngineSession(**{**defaults, **arguments})


def fail(pending, error, *, was_taken):
    pending.stream.fail(error)


def submit(session, submission, *, window):
    pending = PendingRequest(submission, None, window=window, now_s=0.0)
    session.submit(pending)
    return pending.stream


def submission(max_tokens=100):
    return pb.Submission(stops=pb.TokenStops(max_tokens=max_tokens))


def completion(handle, reason=pb.COMPLETION_REASON_CANCELLED):
    return pb.Completion(handle=handle, reason=reason)


def test_handles_are_free_again_after_completion_only():
    session = make_session()
    first, second = submit(session, submission(), window=4), submit(session, submission(), window=4)
    assert (first.handle, second.handle) == (1, 2)
    first.close(CancelReason.CLIENT)
    assert submit(session, submission(), window=4).handle == 3
    session.deal_step(pb.StepResult(step_seq=1, completions=[completion(1)]))
    assert submit(session, submission(), window=4).handle == 1
    session.check_integrity()


def test_a_cancellation_that_the_end_overtakes_does_not_hit_the_next_request_of_its_handle():
    session = make_session()
    submit(session, submission(), window=4).close(CancelReason.CLIENT)
    session.deal_step(pb.StepResult(step_seq=1, completions=[completion(1)]))
    assert submit(session, submission(), window=4).handle == 1
    kinds = [command.WhichOneof("command") for command in session.take_commands()]
    assert "cancel" not in kinds


def test_handles_are_free_again_after_rejection():
    session = make_session()
    submit(session, submission(), window=4)
    rejection = pb.Rejection(handle=1, reason=pb.REJECTION_REASON_QUEUE_FULL)
    session.deal_admission(pb.AdmissionResult(rejections=[rejection]))
    assert session.num_open == 0
    assert submit(session, submission(), window=4).handle == 1


def test_ended_session_fails_all_and_takes_nothing():
    session = make_session()
    stream = submit(session, submission(), window=4)
    (pending,) = session.end(EngineUnavailable("gone"))
    assert pending.stream is stream
    with pytest.raises(EngineUnavailable, match="gone"):
        submit(session, submission(), window=4)
    stream.close(CancelReason.CLIENT)
    session.grant(1, 5)
    session.cancel(1, CancelReason.CLIENT)
    assert [command.WhichOneof("command") for command in session.take_commands()] == ["submit"]


def test_of_an_ended_session_nothing_is_left_that_nobody_waits_for():
    session = make_session()
    submit(session, submission(), window=4).close(CancelReason.CLIENT)
    assert session.num_open == 1
    assert session.end(EngineUnavailable("gone")) == []


@pytest.mark.parametrize("step_seq", [0, 2, 5])
def test_steps_out_of_order_break_the_session(step_seq):
    with pytest.raises(ProtocolViolation, match=f"step {step_seq} came after step 0"):
        make_session().deal_step(pb.StepResult(step_seq=step_seq))


def test_row_may_hold_several_tokens():
    session = make_session()
    one, two = submit(session, submission(), window=4), submit(session, submission(), window=4)
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
    streams = [submit(session, submission(), window=4) for _ in range(2)]
    session.deal_step(pb.StepResult(step_seq=1, handles=[1, 2], token_ids=[5, 6], start_indices=[0, 0]))
    assert [stream._token_ids for stream in streams] == [[5], [6]]


def test_random_engine_leaves_the_invariants_standing():
    rng = random.Random(7)
    session, engine, step_seq, tokens = make_session(), {}, 0, {}
    for _ in range(4000):
        match rng.randrange(5):
            case 0 | 1:
                stream = submit(session, submission(), window=rng.randrange(1, 9))
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


def prompt_logprobs(handle, start_index, num_tokens, epoch=0):
    return pb.PromptLogprobs(handle=handle, epoch=epoch, start_index=start_index, chosen=[-1.0] * num_tokens)


def asking_session():
    session = make_session()
    asking = submission()
    asking.prompt_ids, asking.prompt_logprobs = bytes(4 * 5), 0
    return session, submit(session, asking, window=4)


def first_token(handle, *prompts):
    return pb.StepResult(step_seq=1, handles=[handle], start_indices=[0], token_ids=[1], prompt_logprobs=prompts)


def test_log_probabilities_of_a_prompt_may_come_with_its_first_token_in_parts():
    session, stream = asking_session()
    session.deal_step(first_token(stream.handle, prompt_logprobs(1, 1, 3), prompt_logprobs(1, 4, 1)))
    assert stream.prompt_logprobs.columns.chosen == [-1.0] * 4
    assert stream.first_token_at_s is not None


@pytest.mark.parametrize("prompt", [prompt_logprobs(1, 2, 2), prompt_logprobs(1, 1, 5)])
def test_gap_in_a_prompts_log_probabilities_breaks_the_session(prompt):
    session, _ = asking_session()
    with pytest.raises(ProtocolViolation, match="step 1, handle 1: prompt log-probabilities of"):
        session.deal_step(pb.StepResult(step_seq=1, prompt_logprobs=[prompt]))


def test_log_probabilities_that_nobody_asked_for_break_the_session():
    session = make_session()
    submit(session, submission(), window=4)
    with pytest.raises(ProtocolViolation, match="nobody asked"):
        session.deal_step(pb.StepResult(step_seq=1, prompt_logprobs=[prompt_logprobs(1, 1, 1)]))


def test_late_log_probabilities_of_a_prompt_belong_to_nobody():
    session, stream = asking_session()
    late = [prompt_logprobs(9, 1, 2), prompt_logprobs(1, 3, 2, epoch=7)]
    session.deal_step(pb.StepResult(step_seq=1, prompt_logprobs=late))
    stream.close(CancelReason.CLIENT)
    session.deal_step(pb.StepResult(step_seq=2, prompt_logprobs=[prompt_logprobs(1, 3, 2)]))
    assert stream.prompt_logprobs.num_missing == 4


async def test_first_token_without_all_of_them_fails_its_request_alone():
    session, stream = asking_session()
    session.deal_step(first_token(stream.handle, prompt_logprobs(1, 1, 3)))
    with pytest.raises(EngineFault, match="with 1 log-probabilities of the prompt missing"):
        await stream.take()
