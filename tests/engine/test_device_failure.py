"""A device failure ends every request with an error, and the process with one line."""

from pathlib import Path

import pytest

from chairlift.engine.v1 import engine_service_pb2 as pb
from engine.core.outputs import SchedulerOutput
from engine.errors import DeviceError
from tests.support.engine.client import AttachClient, submission
from tests.support.engine.fake_engine import fake_engine_parts, run_engine
from tests.support.engine.fake_model import FakeModel
from tests.support.engine.process import run_fake_engine

BUILD_FAILING = """
def fail(plan):
    raise DeviceError("step 1 with 3 rows, 7 tokens: CUDA error: an illegal memory access was encountered")


def build_parts():
    parts = fake_engine_parts(on_step=fail)
    parts.scheduler.add_request(Request(RequestId(1), (5, 6), SamplingParams(seed=0, max_tokens=3), arrival_s=0.0))
    return parts
"""


def test_process_ends_with_one_line(tmp_path: Path) -> None:
    result = run_fake_engine(BUILD_FAILING, tmp_path)
    assert result.returncode == 1
    assert result.stderr == (
        "chairlift-engine: error: step 1 with 3 rows, 7 tokens: CUDA error: an illegal memory access was encountered\n"
    )


@pytest.mark.usefixtures("no_linger")
async def test_every_request_ends_with_the_error(caplog: pytest.LogCaptureFixture) -> None:
    def on_step(plan: SchedulerOutput) -> None:
        if plan.step == 5:
            raise DeviceError("CUDA error: unspecified launch failure")

    engine = run_engine(fake_engine_parts(model=FakeModel(end_probability=0.0), on_step=on_step))
    server = await engine.__aenter__()
    async with AttachClient.open(server.address, acks=False) as client:
        answers = await client.generate(submission(1, [1], 30), submission(2, [2], 30))
        with pytest.raises(EOFError):
            await client.until(lambda: False)
    with pytest.raises(DeviceError, match="unspecified launch failure"):
        await engine.__aexit__(None, None, None)
    assert client.statuses[-1].state == pb.ENGINE_STATE_FAILED
    for answer in answers:
        assert answer.completion is not None
        assert "unspecified launch failure" in answer.completion.detail
    assert not [record for record in caplog.records if record.exc_info]
