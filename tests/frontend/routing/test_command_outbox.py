from chairlift.engine.v1 import engine_service_pb2 as pb
from frontend.routing.command_outbox import CommandOutbox
from frontend.routing.stream import CancelReason


def kinds(commands):
    return [command.WhichOneof("command") for command in commands]


def test_take_returns_one_message_per_kind_in_sending_order():
    outbox = CommandOutbox(step_window=20, wake=lambda: None)
    outbox.acknowledge(5)
    outbox.grant(1, 10)
    outbox.cancel(2, CancelReason.CLIENT)
    outbox.cancel(3, CancelReason.STALLED)
    outbox.cancel(4, CancelReason.CLIENT)
    for handle in (5, 6):
        outbox.submit(pb.Submission(handle=handle))
    outbox.grant(1, 5)
    outbox.grant(5, 1)
    commands = list(outbox.take())
    assert kinds(commands) == ["submit", "cancel", "cancel", "credit", "ack"]
    assert [command.command_seq for command in commands] == [2, 3, 4, 5, 6]  # Hello was the first
    assert [submission.handle for submission in commands[0].submit.submissions] == [5, 6]
    assert (list(commands[1].cancel.handles), commands[1].cancel.reason) == ([2, 4], pb.CANCEL_REASON_CLIENT)
    assert (list(commands[2].cancel.handles), commands[2].cancel.reason) == ([3], pb.CANCEL_REASON_STALLED)
    assert (list(commands[3].credit.handles), list(commands[3].credit.tokens)) == ([1, 5], [15, 1])
    assert commands[4].ack.step_seq == 5
    assert list(outbox.take()) == []


def test_cancelled_request_gets_no_credit():
    outbox = CommandOutbox(step_window=64, wake=lambda: None)
    outbox.grant(1, 10)
    outbox.cancel(1, CancelReason.CLIENT)
    assert kinds(outbox.take()) == ["cancel"]


def test_commands_for_an_ended_request_are_dropped():
    outbox = CommandOutbox(step_window=64, wake=lambda: None)
    outbox.cancel(1, CancelReason.CLIENT)
    outbox.cancel(2, CancelReason.CLIENT)
    outbox.grant(3, 10)
    outbox.forget(1)
    outbox.forget(3)
    (command,) = outbox.take()
    assert list(command.cancel.handles) == [2]


def test_an_acknowledgement_is_sent_only_when_a_quarter_of_the_window_is_open():
    wakes = []
    outbox = CommandOutbox(step_window=8, wake=lambda: wakes.append(1))
    outbox.acknowledge(1)
    assert not wakes
    assert kinds(outbox.take()) == []
    outbox.acknowledge(2)
    assert wakes == [1]
    assert kinds(outbox.take()) == ["ack"]
    outbox.acknowledge(3)
    assert wakes == [1]


def test_draining_engine_gets_every_acknowledgement_at_once():
    wakes = []
    outbox = CommandOutbox(step_window=8, wake=lambda: wakes.append(1))
    outbox.acknowledge(1)
    outbox.acknowledge_at_once()
    assert wakes == [1]
    assert next(outbox.take()).ack.step_seq == 1
    outbox.acknowledge_at_once()
    assert wakes == [1]  # nothing new to acknowledge
    outbox.acknowledge(2)
    assert wakes == [1, 1]


def test_large_submissions_are_split_below_the_receive_limit():
    outbox = CommandOutbox(step_window=8, wake=lambda: None)
    for handle in range(1, 21):
        outbox.submit(pb.Submission(handle=handle, prompt_ids=bytes(1 << 20)))
    commands = list(outbox.take())
    assert all(command.ByteSize() < 3 << 20 for command in commands)
    sent = [submission.handle for command in commands for submission in command.submit.submissions]
    assert sent == list(range(1, 21))


def test_submission_larger_than_a_batch_is_sent_alone():
    outbox = CommandOutbox(step_window=8, wake=lambda: None)
    outbox.submit(pb.Submission(handle=1, prompt_ids=bytes(8 << 20)))
    outbox.submit(pb.Submission(handle=2))
    assert [len(command.submit.submissions) for command in outbox.take()] == [1, 1]


def test_each_message_is_encoded_when_the_iterator_reaches_it():
    outbox = CommandOutbox(step_window=8, wake=lambda: None)
    submissions = [pb.Submission(handle=handle, prompt_ids=bytes(4 << 20)) for handle in (1, 2)]
    for submission in submissions:
        outbox.submit(submission)
    commands = outbox.take()
    next(commands)
    submissions[1].priority = 7
    assert next(commands).submit.submissions[0].priority == 7


def test_a_submission_is_unsent_until_the_iterator_reaches_its_message():
    outbox = CommandOutbox(step_window=8, wake=lambda: None)
    for handle in (1, 2, 3):
        outbox.submit(pb.Submission(handle=handle, prompt_ids=bytes(2 << 20)))
    commands = outbox.take()
    assert outbox.unsent_handles == {1, 2, 3}
    next(commands)  # while it is written, the engine may be lost
    assert outbox.unsent_handles == {2, 3}
    outbox.submit(pb.Submission(handle=4))
    list(commands)
    assert outbox.unsent_handles == {4}


def test_every_other_command_wakes_the_writer():
    wakes = []
    outbox = CommandOutbox(step_window=8, wake=lambda: wakes.append(1))
    outbox.submit(pb.Submission(handle=1))
    assert len(wakes) == 1
    outbox.grant(1, 10)
    assert len(wakes) == 2
    outbox.cancel(1, CancelReason.CLIENT)
    assert len(wakes) == 3
