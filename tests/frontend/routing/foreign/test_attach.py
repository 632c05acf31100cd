"""ForeignAttach by itself: commands and events of the engine protocol, against an engine over real gRPC."""

import grpc
import pytest

from chairlift.engine.v1 import engine_service_pb2 as pb
from frontend.engine_address import EngineKind
from frontend.routing import wire
from frontend.routing.foreign.attach import make_stub
from tests.support.frontend.foreign_answers import answer_to
from tests.support.frontend.foreign_engine import ForeignEngine

PROMPT = [70, 71, 72]


@pytest.fixture
async def engine():
    engine = ForeignEngine()
    await engine.start()
    yield engine
    await engine.kill()


@pytest.fixture
async def call(engine):
    async with grpc.aio.insecure_channel(engine.address) as channel:
        call = make_stub(EngineKind.VLLM, channel, "vllm://engine", {}).Attach()
        await call.write(pb.AttachRequest(hello=pb.Hello(protocol_major=1)))
        assert (await call.read()).WhichOneof("event") == "welcome"
        yield call
        call.cancel()


def submission(**fields):
    stops = pb.TokenStops(max_tokens=100, ignore_end_token=True)
    sampling = pb.Sampling(top_p=1, repetition_penalty=1)
    return pb.Submission(handle=1, prompt_ids=wire.ids_to_bytes(PROMPT), sampling=sampling, stops=stops, **fields)


async def submit(call, **fields):
    await call.write(pb.AttachRequest(submit=pb.SubmitBatch(submissions=[submission(**fields)])))


async def tokens_before_heartbeats(call, num_tokens):
    """Reads so many tokens, and what comes before the next two heartbeats."""
    token_ids, num_heartbeats = [], 0
    while len(token_ids) < num_tokens or num_heartbeats < 2:
        response = await call.read()
        token_ids += response.step.token_ids
        num_heartbeats += response.HasField("status") and len(token_ids) >= num_tokens
    return token_ids


async def test_an_engine_is_not_read_further_than_the_credit(call):
    await submit(call, token_credit=4)
    expected = answer_to(PROMPT, 100, ignore_end=True)
    assert await tokens_before_heartbeats(call, 4) == expected[:4]
    await call.write(pb.AttachRequest(credit=pb.CreditGrant(handles=[1], tokens=[8])))
    assert await tokens_before_heartbeats(call, 8) == expected[4:12]


async def test_events_of_one_request(call):
    await submit(call, epoch=2)
    steps = []
    while not steps or not steps[-1].completions:
        response = await call.read()
        if response.HasField("step"):
            steps.append(response.step)
    assert [step.step_seq for step in steps] == list(range(1, len(steps) + 1))
    (first,) = (first for step in steps for first in step.first_tokens)
    assert (first.handle, first.epoch) == (1, 2)
    assert steps[0].first_tokens
    (completion,) = steps[-1].completions
    assert (completion.epoch, completion.reason) == (2, pb.COMPLETION_REASON_MAX_TOKENS)
    assert (completion.num_prompt_tokens, completion.num_output_tokens) == (3, 100)
    assert [one for step in steps for one in step.token_ids] == answer_to(PROMPT, 100, ignore_end=True)


async def test_cancelled_request_completes_at_once(call, engine):
    engine.pause()
    await submit(call)
    await engine.wait_for(lambda: engine.num_open)
    await call.write(pb.AttachRequest(cancel=pb.CancelBatch(handles=[1], reason=pb.CANCEL_REASON_CLIENT)))
    while not (response := await call.read()).HasField("step"):
        pass
    assert [one.reason for one in response.step.completions] == [pb.COMPLETION_REASON_CANCELLED]
    await engine.wait_for(lambda: engine.aborted)
    engine.resume()


async def test_loop_turns_stand_still_while_the_engine_owes_tokens(call, engine):
    """So that --step-timeout finds an engine that answers polls and computes nothing."""

    async def turns():
        while not (response := await call.read()).HasField("status"):
            pass
        return response.status.loop_turns

    assert await turns() < await turns() < await turns()
    engine.pause()
    await submit(call)
    await engine.wait_for(lambda: engine.num_open)
    await turns()
    assert await turns() == await turns()
    engine.resume()
