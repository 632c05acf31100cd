"""Messages to one frontend: order, merging and bounds."""

import asyncio
import dataclasses

import grpc
import pytest

from chairlift.engine.v1 import engine_service_pb2 as pb
from chairlift.service.end_reason import EndReason
from chairlift.service.engine_protocol import MAX_FRONTEND_MESSAGE_BYTES
from engine.core.outputs import (
    PromptLogprobs,
    RequestCompletion,
    RequestOutput,
    SchedulerStats,
    TimeAccount,
    TokenLogprobs,
)
from engine.core.request import RequestId
from engine.interfaces import LoopSnapshot
from engine.serving.client_errors import CallRefused
from engine.serving.outgoing import MAX_UNSENT_ADMISSIONS, STEP_WINDOW, Outgoing

SNAPSHOT = LoopSnapshot(9, 9, SchedulerStats(1, 2, 3, 4, 5, 6, 7, 8, 9, 10), 11, 12, 13)
NO_TIME = TimeAccount(0.0, 0.0, 0.0, 0.0, 0.0, num_preemptions=0)


def output(start_index: int, *token_ids: int, **fields: object) -> RequestOutput:
    return RequestOutput(RequestId(1), start_index, token_ids, **fields)  # type: ignore[arg-type]


async def next_step(outgoing: Outgoing) -> pb.StepResult:
    outgoing.end_step()
    message = await outgoing.next_message()
    assert message is not None
    assert message.WhichOneof("event") == "step"
    return message.step


async def test_admission_comes_first_and_status_is_replaced() -> None:
    outgoing = Outgoing()
    outgoing.add_output(1, 0, output(0, 5), SNAPSHOT, 77)
    outgoing.set_status(pb.EngineStatus(engine_step=1))
    outgoing.set_status(pb.EngineStatus(engine_step=2))
    outgoing.announce_drain(pb.DrainNotice())
    outgoing.reject(pb.Rejection(handle=3))
    outgoing.accept(1)
    outgoing.close()
    messages = []
    while len(messages) < 4:
        messages.append(await outgoing.next_message())
    assert [m.WhichOneof("event") for m in messages if m] == ["admission", "drain", "status", "step"]
    assert messages[2] is not None
    assert messages[2].status.engine_step == 2


async def test_the_first_event_of_a_handle_stands_for_its_acceptance() -> None:
    outgoing = Outgoing()
    for handle in (1, 2, 3, 4):
        outgoing.accept(handle)
    outgoing.add_output(1, 0, output(0, 5), SNAPSHOT, 77)
    outgoing.complete(pb.Completion(handle=3))
    first = await outgoing.next_message()
    assert first is not None
    assert list(first.admission.accepted_handles) == [2, 4]
    step = await next_step(outgoing)
    assert list(step.handles) == [1]
    outgoing.accept(5)
    outgoing.add_output(5, 0, output(0, 5), SNAPSHOT, 77)
    assert list((await next_step(outgoing)).handles) == [5], "there is no admission without a handle"


async def test_columns_omit_default_values() -> None:
    outgoing = Outgoing()
    outgoing.add_output(4, 0, output(0, 5, num_cached_tokens=16), SNAPSHOT, 77)
    outgoing.add_output(2, 0, output(7, 8), SNAPSHOT, 78)
    step = await next_step(outgoing)
    assert (list(step.handles), list(step.token_ids), list(step.start_indices)) == ([4, 2], [5, 8], [0, 7])
    assert list(step.token_counts) == list(step.epochs) == []
    assert not step.HasField("logprobs")
    assert (step.step_seq, step.engine_step, step.sampled_at_ns) == (1, 9, 78)
    assert list(step.first_tokens) == [pb.FirstToken(handle=4, num_cached_tokens=16)]
    assert step.load == pb.LoadStats(
        num_running=1,
        num_waiting=2,
        num_waiting_prefill_tokens=3,
        num_free_blocks=4,
        num_preemptions_total=6,
        num_recomputed_tokens_total=7,
        prefix_cache_queries_total=8,
        prefix_cache_hits_total=9,
        num_generated_tokens_total=10,
        step_us=11,
        execute_us=12,
        num_batched_tokens=13,
    )


async def test_steps_are_merged_into_one_row_per_request() -> None:
    outgoing = Outgoing()
    first, second = TokenLogprobs(-0.5, (5, 6), (-0.5, -1.0)), TokenLogprobs(-0.25, (7, 8), (-0.25, -2.0))
    outgoing.add_output(1, 3, output(2, 5, logprobs=(first,)), SNAPSHOT, 1)
    outgoing.add_output(2, 0, output(0, 9), SNAPSHOT, 1)
    completion = RequestCompletion(
        EndReason.STOP_TOKEN, 10, 0, 4, TimeAccount(0.25, 0.5, 1.5, 2.0, 3.0, num_preemptions=1), stop_token_id=7
    )
    outgoing.add_output(1, 3, output(3, 7, logprobs=(second,), completion=completion), SNAPSHOT, 2)
    step = await next_step(outgoing)
    assert (list(step.handles), list(step.token_counts), list(step.token_ids)) == ([1, 2], [2, 1], [5, 7, 9])
    assert (list(step.start_indices), list(step.epochs)) == ([2, 0], [3, 0])
    columns = step.logprobs
    assert (list(columns.rows), list(columns.chosen), list(columns.top_widths)) == ([0], [-0.5, -0.25], [2])
    assert (list(columns.top_ids), list(columns.top_values)) == ([5, 6, 7, 8], [-0.5, -1.0, -0.25, -2.0])
    (done,) = step.completions
    assert (done.handle, done.epoch, done.reason, done.stop_token_id) == (1, 3, pb.COMPLETION_REASON_STOP_TOKEN, 7)
    assert (done.num_output_tokens, done.num_preemptions, done.queued_us, done.prefill_us) == (4, 1, 250_000, 500_000)
    assert (done.decode_us, done.parked_us, done.preempted_us) == (1_500_000, 2_000_000, 3_000_000)


async def test_prompt_logprobs_of_merged_steps_remain_separate_messages() -> None:
    outgoing = Outgoing()
    tokens = [TokenLogprobs(-0.5 * i, (i, i + 1), (-0.25, -1.0 * i)) for i in range(1, 4)]
    outgoing.add_output(1, 3, output(0, prompt_logprobs=PromptLogprobs(1, (tokens[0],))), SNAPSHOT, 1)
    outgoing.add_output(1, 3, output(0, prompt_logprobs=PromptLogprobs(2, (tokens[1], tokens[2]))), SNAPSHOT, 2)
    outgoing.add_output(2, 0, output(0, prompt_logprobs=PromptLogprobs(1, (TokenLogprobs(-4.0, (), ()),))), SNAPSHOT, 2)
    outgoing.add_output(1, 3, output(0, 5, num_cached_tokens=0), SNAPSHOT, 2)
    step = await next_step(outgoing)
    assert (list(step.handles), list(step.token_ids)) == ([1], [5])
    first, second, plain = step.prompt_logprobs
    assert (first.handle, first.epoch, first.start_index, first.top_width) == (1, 3, 1, 2)
    assert (second.handle, second.epoch, second.start_index, list(second.chosen)) == (1, 3, 2, [-1.0, -1.5])
    assert (list(second.top_ids), list(second.top_values)) == ([2, 3, 3, 4], [-0.25, -2.0, -0.25, -3.0])
    assert (plain.handle, plain.top_width, list(plain.chosen), list(plain.top_ids)) == (2, 0, [-4.0], [])


async def test_logprobs_of_prompts_count_against_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.serving.outgoing.MAX_UNSENT_VALUES", 9)
    outgoing = Outgoing()
    piece = PromptLogprobs(1, (TokenLogprobs(-0.5, (1, 2), (-0.5, -1.0)),) * 3)
    outgoing.add_output(1, 0, output(0, prompt_logprobs=piece), SNAPSHOT, 1)
    await next_step(outgoing)
    outgoing.add_output(1, 0, output(0, 5, prompt_logprobs=piece), SNAPSHOT, 1)
    with pytest.raises(CallRefused, match="10 tokens and log-probabilities are unread"):
        await outgoing.next_message()


async def test_logprobs_of_outputs_count_against_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the most alternatives a token takes 80 KiB."""
    monkeypatch.setattr("engine.serving.outgoing.MAX_UNSENT_VALUES", 9)
    monkeypatch.setattr("engine.serving.outgoing.MAX_MESSAGE_VALUES", 4)
    outgoing = Outgoing()
    logprobs = (TokenLogprobs(-0.5, (1, 2), (-0.5, -1.0)),)
    for index in range(3):
        outgoing.add_output(1, 0, output(index, 5, logprobs=logprobs), SNAPSHOT, 1)
        outgoing.end_step()
    with pytest.raises(CallRefused, match="12 tokens and log-probabilities are unread, at most 9"):
        await outgoing.next_message()


async def test_newest_time_account_of_a_request_replaces_an_older_one() -> None:
    outgoing = Outgoing()
    outgoing.add_output(1, 3, output(0, 5, time=NO_TIME._replace(queued_s=1.0)), SNAPSHOT, 1)
    outgoing.add_output(2, 0, output(0, 5), SNAPSHOT, 1)
    newest = TimeAccount(1.0, 0.5, 7.0, 2.0, 3.0, num_preemptions=1)
    outgoing.add_output(1, 3, output(1, 6, time=newest), SNAPSHOT, 2)
    (told,) = (await next_step(outgoing)).time_accounts
    assert told == pb.TimeAccount(
        handle=1,
        epoch=3,
        queued_us=1_000_000,
        prefill_us=500_000,
        parked_us=2_000_000,
        preempted_us=3_000_000,
        num_preemptions=1,
    )


async def test_a_full_window_delays_rows_until_an_acknowledgement() -> None:
    outgoing = Outgoing()
    for index in range(STEP_WINDOW):
        outgoing.add_output(1, 0, output(index, 5), SNAPSHOT, 1)
        await next_step(outgoing)
    outgoing.add_output(1, 0, output(STEP_WINDOW, 5), SNAPSHOT, 1)
    outgoing.set_status(pb.EngineStatus())
    message = await outgoing.next_message()
    assert message is not None
    assert message.WhichOneof("event") == "status"
    outgoing.acknowledge(1)
    assert (await next_step(outgoing)).step_seq == STEP_WINDOW + 1


async def test_a_closing_stream_sends_everything_despite_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.serving.outgoing.STEP_WINDOW", 0)
    outgoing = Outgoing()
    outgoing.add_output(1, 0, output(0, 5), SNAPSHOT, 1)
    outgoing.close()
    assert (await next_step(outgoing)).step_seq == 1
    outgoing.acknowledge(1)
    assert await outgoing.next_message() is None


async def test_a_closing_stream_waits_for_its_acknowledgement_for_a_limited_time() -> None:
    outgoing = Outgoing()
    outgoing.add_output(1, 0, output(0, 5), SNAPSHOT, 1)
    outgoing.close(linger_s=0.05)
    await next_step(outgoing)
    assert await outgoing.next_message() is None


async def test_an_acknowledgement_of_an_unsent_step_is_an_error() -> None:
    with pytest.raises(CallRefused, match="ack of step_seq 1, but only 0 were sent"):
        Outgoing().acknowledge(1)


async def test_a_receiver_that_lags_too_far_is_disconnected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.serving.outgoing.MAX_UNSENT_VALUES", 3)
    outgoing = Outgoing()
    outgoing.add_output(1, 0, output(0, 5, 6, 7), SNAPSHOT, 1)
    outgoing.add_output(1, 0, output(3, 8), SNAPSHOT, 1)
    with pytest.raises(CallRefused, match="4 tokens and log-probabilities are unread, at most 3") as caught:
        await outgoing.next_message()
    assert caught.value.code is grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_steps_are_merged_to_messages_that_a_frontend_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many streams with the most alternatives, and a frontend that lags by several hundred tokens of each."""
    monkeypatch.setattr("engine.serving.outgoing.STEP_WINDOW", 0)
    outgoing = Outgoing()
    num_streams, num_steps, num_at_once = 32, 40, 70
    logprobs = (TokenLogprobs(-0.5, tuple(range(130_000, 130_020)), (-1.0,) * 20),) * num_at_once
    ended = RequestCompletion(EndReason.MAX_TOKENS, 1, 0, num_steps * num_at_once, NO_TIME)
    for number in range(num_steps):
        snapshot = dataclasses.replace(SNAPSHOT, engine_step=number)
        for handle in range(1, num_streams + 1):
            tokens = output(
                number * num_at_once,
                *range(number * num_at_once, (number + 1) * num_at_once),
                logprobs=logprobs,
                completion=ended if number == num_steps - 1 or (handle, number) == (1, 20) else None,
            )
            if handle > 1 or number <= 20:
                outgoing.add_output(handle, 0, tokens, snapshot, number)
        outgoing.end_step()
    assert all(outgoing.has_unsent_end(handle) for handle in range(1, num_streams + 1))
    outgoing.close()
    received: dict[int, list[int]] = {}
    completed: list[int] = []
    num_merged = num_logprobs = num_messages = 0
    while sum(map(len, received.values())) < ((num_streams - 1) * num_steps + 21) * num_at_once:
        message = await outgoing.next_message()
        assert message is not None
        assert message.ByteSize() <= MAX_FRONTEND_MESSAGE_BYTES
        num_messages += 1
        assert message.step.step_seq == num_messages
        tokens_left = list(message.step.token_ids)
        for handle, start, count in zip(
            message.step.handles, message.step.start_indices, message.step.token_counts, strict=True
        ):
            assert handle not in completed
            assert start == len(received.setdefault(handle, []))
            received[handle] += tokens_left[:count]
            del tokens_left[:count]
        completed += [completion.handle for completion in message.step.completions]
        num_merged += message.step.num_steps
        num_logprobs += len(message.step.logprobs.chosen)
    assert received == {h: list(range((num_steps if h > 1 else 21) * num_at_once)) for h in received}
    assert sorted(completed) == list(range(1, num_streams + 1))
    assert num_logprobs == sum(map(len, received.values()))
    assert num_merged == num_steps
    assert num_messages < num_steps / 4
    assert not outgoing.has_unsent_end(1)


async def test_full_messages_count_against_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.serving.outgoing.MAX_UNSENT_VALUES", 6)
    monkeypatch.setattr("engine.serving.outgoing.MAX_MESSAGE_VALUES", 2)
    outgoing = Outgoing()
    for index in range(3):
        outgoing.add_output(1, 0, output(2 * index, 5, 6), SNAPSHOT, 1)
        outgoing.end_step()
    message = await outgoing.next_message()
    assert message is not None
    assert list(message.step.token_ids) == [5, 6]
    outgoing.add_output(1, 0, output(6, 5, 6), SNAPSHOT, 1)  # what was sent counts no more
    outgoing.add_output(2, 0, output(0, 7), SNAPSHOT, 1)
    with pytest.raises(CallRefused, match="7 tokens and log-probabilities are unread"):
        await outgoing.next_message()


async def test_a_refused_stream_keeps_nothing_while_the_write_of_its_last_message_is_stuck(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """`next_message` is not called then, so that its error ends nothing."""
    monkeypatch.setattr("engine.serving.outgoing.MAX_UNSENT_VALUES", 3)
    outgoing = Outgoing()
    outgoing.complete(pb.Completion(handle=1))
    outgoing.add_output(2, 0, output(0, 1, 2, 3), SNAPSHOT, 77)
    assert not outgoing.is_full
    outgoing.add_output(2, 0, output(3, 4), SNAPSHOT, 77)
    assert outgoing.is_full  # further commands are not read
    ended = RequestCompletion(EndReason.MAX_TOKENS, 1, 0, 5, NO_TIME)
    outgoing.add_output(2, 0, output(4, 5, completion=ended), SNAPSHOT, 77)
    outgoing.complete(pb.Completion(handle=3))
    assert not any(outgoing.has_unsent_end(handle) for handle in (1, 2, 3))
    with pytest.raises(CallRefused, match="4 tokens and log-probabilities are unread, at most 3"):
        await outgoing.next_message()


async def test_unsent_admissions_are_bounded() -> None:
    outgoing = Outgoing()
    for handle in range(MAX_UNSENT_ADMISSIONS):
        assert not outgoing.is_full
        outgoing.accept(handle)
    assert outgoing.is_full
    await outgoing.next_message()
    assert not outgoing.is_full


def step(outgoing: Outgoing, number: int, *, num_streams: int = 8) -> None:
    """Adds a token for each stream."""
    snapshot = dataclasses.replace(SNAPSHOT, engine_step=number)
    for handle in range(1, num_streams + 1):
        outgoing.add_output(handle, 0, output(number, 5), snapshot, 1000 + number)
    outgoing.end_step()


async def sent(outgoing: Outgoing) -> pb.StepResult | None:
    """Returns the message that is sent at once; None if rows wait."""
    waiting = asyncio.create_task(outgoing.next_message())
    for _ in range(3):
        await asyncio.sleep(0)
    if not waiting.done():
        waiting.cancel()
        return None
    message = waiting.result()
    assert message is not None
    return message.step


async def test_steps_that_come_together_are_one_message_with_their_number() -> None:
    outgoing = Outgoing()
    for number in range(4):
        step(outgoing, number)
    message = await sent(outgoing)
    assert message is not None
    assert (message.num_steps, message.engine_step, message.sampled_at_ns) == (4, 3, 1003)
    assert list(message.token_counts) == [4] * 8
    step(outgoing, 4)
    message = await sent(outgoing)
    assert message is not None
    assert message.num_steps == 1


async def test_steps_that_wait_for_the_window_are_sent_after_an_acknowledgement() -> None:
    outgoing = Outgoing()
    for number in range(STEP_WINDOW):
        step(outgoing, number)
        assert await sent(outgoing) is not None
    step(outgoing, STEP_WINDOW)
    step(outgoing, STEP_WINDOW + 1)
    assert await sent(outgoing) is None
    outgoing.acknowledge(1)
    message = await sent(outgoing)
    assert message is not None
    assert message.num_steps == 2


async def test_accepted_and_rejected_submissions_that_are_unsent_count_together() -> None:
    outgoing = Outgoing()
    for handle in range(MAX_UNSENT_ADMISSIONS // 2):
        outgoing.accept(handle)
        assert not outgoing.is_full
        outgoing.reject(pb.Rejection(handle=10_000 + handle))
    assert outgoing.is_full
    await outgoing.next_message()
    assert not outgoing.is_full


async def test_a_completion_outside_a_step_is_sent_at_once_and_holds_its_handle() -> None:
    outgoing = Outgoing()
    waiting = asyncio.create_task(outgoing.next_message())
    await asyncio.sleep(0)
    outgoing.complete(pb.Completion(handle=4, reason=pb.COMPLETION_REASON_CANCELLED))
    assert outgoing.has_unsent_end(4)
    message = await waiting
    assert message is not None
    assert [completion.handle for completion in message.step.completions] == [4]
    assert not outgoing.has_unsent_end(4)


@pytest.mark.parametrize("event", ["drain", "status", "admission"])
async def test_every_event_wakes_the_writer(event: str) -> None:
    outgoing = Outgoing()
    waiting = asyncio.create_task(outgoing.next_message())
    await asyncio.sleep(0)
    match event:
        case "drain":
            outgoing.announce_drain(pb.DrainNotice())
        case "status":
            outgoing.set_status(pb.EngineStatus())
        case _:
            outgoing.accept(1)
    message = await waiting
    assert message is not None
    assert message.WhichOneof("event") == event
