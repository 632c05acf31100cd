"""Tests of `EngineSession`, also with a random engine: handles, streams and commands."""

import random

import pytest

from chairlift.engine.v1 import engine_service_pb2 as pb
from frontend.errors import EngineFault, EngineUnavailable
from frontend.routing.pending import PendingRequest
from frontend.routing.placement import EngineLoad
from frontend.routing.session import EngineSession
from frontend.routing.stream import CancelReason
from frontend.routing.wire import ProtocolViolation


def make_session(**arguments):
    defaults = {"vocab_size": 10, "block_size": 16, "step_window": 4, "wake": lambda: None, "on_rejected": fail}
    return EngineSession(**{**defaults, **arguments})


def fail(request, error, *, was_taken):
    request.stream.fail(error)


def submit(session, submission=None, *, window=4, num_cached_tokens=0):
    """Returns the request's stream id and its stream."""
    request = PendingRequest(submission or new_submission(), None, window=window, now_s=0.0)
    session.submit(request, num_cached_tokens)
    return request.submission.handle, request.stream


def new_submission():
    return pb.Submission(stops=pb.TokenStops(max_tokens=100))


def completion(handle, reason=pb.COMPLETION_REASON_CANCELLED):
    return pb.Completion(handle=handle, reason=reason)


def test_handles_are_free_again_after_completion_only():
    session = make_session()
    (first_id, first), (second_id, _) = submit(session), submit(session)
    assert (first_id, second_id) == (1, 2)
    first.close(CancelReason.CLIENT)
    assert submit(session)[0] == 3
    session.on_step(pb.StepResult(step_seq=1, completions=[completion(1)]))
    assert submit(session)[0] == 1
    session.check_integrity()


def test_late_cancellation_does_not_affect_the_next_request_with_its_handle():
    session = make_session()
    submit(session)[1].close(CancelReason.CLIENT)
    session.on_step(pb.StepResult(step_seq=1, completions=[completion(1)]))
    assert submit(session)[0] == 1
    kinds = [command.WhichOneof("command") for command in session.take_commands()]
    assert "cancel" not in kinds


def test_handles_are_free_again_after_rejection():
    session = make_session()
    submit(session)
    rejection = pb.Rejection(handle=1, reason=pb.REJECTION_REASON_QUEUE_FULL)
    session.on_admission(pb.AdmissionResult(rejections=[rejection]))
    assert session.num_open == 0
    assert submit(session)[0] == 1


def test_request_that_the_engine_drops_is_returned_to_the_router():
    returned = []
    session = make_session(on_rejected=lambda request, error, *, was_taken: returned.append((error, was_taken)))
    _, stream = submit(session)
    session.on_step(pb.StepResult(step_seq=1, completions=[completion(1)]))
    ((error, was_taken),) = returned
    assert (type(error), was_taken, stream.closed) == (EngineUnavailable, True, False)


def test_request_with_a_token_outside_the_vocabulary_fails_and_is_cancelled():
    session = make_session(vocab_size=10)
    (_, stream), (_, other) = submit(session), submit(session)
    session.on_step(pb.StepResult(step_seq=1, handles=[1, 2], token_ids=[10, 9], start_indices=[0, 0]))
    assert (stream.closed, list(other.output_ids)) == (True, [9])
    commands = list(session.take_commands())
    assert [command.cancel.handles for command in commands if command.HasField("cancel")] == [[1]]


def test_ended_session_returns_its_requests_and_refuses_new_ones():
    session = make_session()
    _, stream = submit(session)
    assert [command.WhichOneof("command") for command in session.take_commands()] == ["submit"]
    (request,), unsent = session.end(EngineUnavailable("gone"))
    assert (request.stream, unsent) == (stream, [])
    with pytest.raises(EngineUnavailable, match="gone"):
        submit(session)
    stream.close(CancelReason.CLIENT)
    assert list(session.take_commands()) == []


def test_requests_that_never_left_an_ended_session_are_returned_apart():
    session = make_session()
    (_, sent), _ = submit(session), list(session.take_commands())
    _, unsent = submit(session)
    requests = session.end(EngineUnavailable("gone"))
    assert [[request.stream for request in those] for those in requests] == [[sent], [unsent]]


def test_ended_session_does_not_return_cancelled_requests():
    session = make_session()
    submit(session)[1].close(CancelReason.CLIENT)
    assert session.num_open == 1
    assert session.end(EngineUnavailable("gone")) == ([], [])


@pytest.mark.parametrize("step_seq", [0, 2, 5])
def test_steps_out_of_order_break_the_session(step_seq):
    with pytest.raises(ProtocolViolation, match=f"step {step_seq} came after step 0"):
        make_session().on_step(pb.StepResult(step_seq=step_seq))


def test_row_may_contain_several_tokens():
    session = make_session()
    (_, one), (_, two) = submit(session), submit(session)
    session.on_step(
        pb.StepResult(
            step_seq=1, handles=[1, 2], token_counts=[2, 1], token_ids=[5, 6, 7], start_indices=[0, 0],
            first_tokens=[pb.FirstToken(handle=2, num_cached_tokens=16)],
        )
    )  # fmt: skip
    assert (list(one.output_ids), list(two.output_ids)) == ([5, 6], [7])
    assert (one.num_cached_tokens, two.num_cached_tokens) == (0, 16)


def test_counts_and_attempts_may_be_left_out():
    session = make_session()
    streams = [submit(session)[1] for _ in range(2)]
    session.on_step(pb.StepResult(step_seq=1, handles=[1, 2], token_ids=[5, 6], start_indices=[0, 0]))
    assert [list(stream.output_ids) for stream in streams] == [[5], [6]]


def test_invariants_hold_with_a_random_engine():
    rng = random.Random(7)
    session, engine, step_seq, tokens = make_session(), {}, 0, {}
    for _ in range(4000):
        match rng.randrange(5):
            case 0 | 1:
                handle, stream = submit(session, window=rng.randrange(1, 9))
                assert handle not in engine, "the handle is in use in the engine"
                engine[handle] = stream
                tokens[handle] = 0
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
                session.on_step(step)
                for ended in step.completions:
                    assert engine.pop(ended.handle).closed
            case 4:
                list(session.take_commands())
        session.check_integrity()
        assert session.num_open == len(engine)


def prompt_logprobs(handle, start_index, num_tokens, epoch=0):
    return pb.PromptLogprobs(handle=handle, epoch=epoch, start_index=start_index, chosen=[-1.0] * num_tokens)


def asking_session():
    session = make_session()
    asking = new_submission()
    asking.prompt_ids, asking.prompt_logprobs = bytes(4 * 5), 0
    return session, submit(session, asking)[1]


def first_token(handle, *prompts):
    return pb.StepResult(step_seq=1, handles=[handle], start_indices=[0], token_ids=[1], prompt_logprobs=prompts)


def test_log_probabilities_of_a_prompt_may_come_with_its_first_token_in_parts():
    session, stream = asking_session()
    session.on_step(first_token(1, prompt_logprobs(1, 1, 3), prompt_logprobs(1, 4, 1)))
    assert [len(piece.chosen) for piece in stream.prompt_logprobs.pieces(10)] == [3, 1]
    assert stream.clock.first_token_at_s is not None


@pytest.mark.parametrize("prompt", [prompt_logprobs(1, 2, 2), prompt_logprobs(1, 1, 5)])
def test_gap_in_a_prompts_log_probabilities_breaks_the_session(prompt):
    session, _ = asking_session()
    with pytest.raises(ProtocolViolation, match="step 1, handle 1: prompt log-probabilities of"):
        session.on_step(pb.StepResult(step_seq=1, prompt_logprobs=[prompt]))


def test_log_probabilities_that_were_not_requested_break_the_session():
    session = make_session()
    submit(session)
    with pytest.raises(ProtocolViolation, match="not requested"):
        session.on_step(pb.StepResult(step_seq=1, prompt_logprobs=[prompt_logprobs(1, 1, 1)]))


def test_late_log_probabilities_of_a_prompt_are_dropped():
    session, stream = asking_session()
    late = [prompt_logprobs(9, 1, 2), prompt_logprobs(1, 3, 2, epoch=7)]
    session.on_step(pb.StepResult(step_seq=1, prompt_logprobs=late))
    stream.close(CancelReason.CLIENT)
    session.on_step(pb.StepResult(step_seq=2, prompt_logprobs=[prompt_logprobs(1, 3, 2)]))
    assert stream.prompt_logprobs.num_missing == 4


async def test_first_token_before_all_prompt_log_probabilities_fails_only_its_request():
    session, stream = asking_session()
    session.on_step(first_token(1, prompt_logprobs(1, 1, 3)))
    with pytest.raises(EngineFault, match="with 1 log-probabilities of the prompt missing"):
        await stream.take()


def test_load_is_own_requests_now_and_others_as_of_the_last_report():
    session = make_session()
    prompt = pb.Submission(stops=pb.TokenStops(max_tokens=100), prompt_ids=bytes(4 * 15))
    submit(session, prompt)
    assert session.load()[:2] == (1, 15)
    session.note_load(pb.LoadStats(num_running=1, num_waiting=3, num_waiting_prefill_tokens=100, num_free_blocks=7))
    assert session.load()[:3] == (4, 100, 7 * 16)
    submit(session, prompt)
    assert session.load()[:3] == (5, 115, 7 * 16)
    session.note_load(pb.LoadStats(num_running=1, num_free_blocks=7))  # the second request has not arrived there yet
    assert session.load()[:3] == (2, 30, 7 * 16)
    session.on_step(pb.StepResult(step_seq=1, first_tokens=[pb.FirstToken(handle=1)]))
    assert session.load()[:3] == (2, 15, 7 * 16)


def test_with_a_rate_cached_prompt_tokens_are_no_load():
    session = make_session()
    prompt = pb.Submission(stops=pb.TokenStops(max_tokens=100), prompt_ids=bytes(4 * 15))
    submit(session, prompt, num_cached_tokens=12)
    assert session.load() == EngineLoad(1, 15, 1 << 60, 0.0), "without a rate nothing changes"
    session.note_load(
        pb.LoadStats(num_waiting_prefill_tokens=15, num_free_blocks=7, model_coefficients=[1, 0.125, 1, 1, 1])
    )
    assert session.load() == EngineLoad(1, 3, 7 * 16, 8.0)
    session.on_step(pb.StepResult(step_seq=1, first_tokens=[pb.FirstToken(handle=1)]))
    assert session.load() == EngineLoad(1, 0, 7 * 16, 8.0)
    session.note_load(pb.LoadStats(num_running=1, model_coefficients=[1, 0.0, 1, 1, 1]))
    assert session.load().prompt_tokens_per_s == 0.0
    session.check_integrity()


def targeted(num_tokens, ttft_ms):
    submission = new_submission()
    submission.prompt_ids = bytes(4 * num_tokens)
    submission.ttft_remaining_ms = ttft_ms
    return submission


def load(rate, on_time, *, best_effort=0, **fields):
    return pb.LoadStats(prompt_tokens_per_second=rate, lane_tokens=[on_time, best_effort], **fields)


def test_forecast_counts_own_prompts_that_are_due_earlier_until_their_first_token():
    session = make_session()
    session.note_load(load(1000.0, 0, step_us=20_000, model_coefficients=[0.5, 0.25, 0.125, 9.0, 9.0]))
    submit(session, targeted(100, 500))
    submit(session, targeted(10, 2000))
    submit(session)  # best effort
    assert session.forecast(0.4).num_tokens_ahead == 0
    assert session.forecast(0.5) == (1000.0, 100, 0.02, 0.875)
    assert session.forecast(2.0).num_tokens_ahead == 110
    session.on_step(pb.StepResult(step_seq=1, first_tokens=[pb.FirstToken(handle=1)]))
    assert session.forecast(2.0).num_tokens_ahead == 10
    session.on_step(pb.StepResult(step_seq=2, completions=[completion(2)]))
    assert session.forecast(2.0).num_tokens_ahead == 0
    session.check_integrity()


def test_forecast_counts_the_prompts_on_time_of_other_frontends():
    session = make_session()
    submit(session, targeted(100, 500))
    session.note_load(load(1000.0, 350, best_effort=10_000))
    assert session.forecast(0.1).num_tokens_ahead == 250
    assert session.forecast(0.5).num_tokens_ahead == 350


def test_forecast_of_an_engine_without_a_model_predicts_nothing():
    session = make_session()
    session.note_load(pb.LoadStats(num_waiting=5))
    assert session.forecast(1.0) == (0.0, 0, 0.0, 0.0)


def test_forecast_of_an_idle_engine_knows_no_last_step():
    session = make_session()
    session.note_load(load(1000.0, 0, step_us=20_000_000, model_coefficients=[0.5, 0.25, 0.125, 9.0, 9.0]))
    assert session.forecast(1.0).step_s == 0.875
    session.note_load(load(1000.0, 0, step_us=20_000_000, num_running=1))
    assert session.forecast(1.0).step_s == 20.0


def test_forecast_keeps_the_last_measured_rate():
    session = make_session()
    session.note_load(load(1000.0, 0))
    session.note_load(pb.LoadStats())
    assert session.forecast(1.0).tokens_per_second == 1000.0
