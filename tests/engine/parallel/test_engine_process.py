"""`python -m engine --tensor-parallel-size 2`: it serves, and its two processes end together."""

import contextlib
import os
import re
import select
import shutil
import signal
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path

import grpc
import pytest

from chairlift.engine.v1 import engine_service_pb2 as pb
from tests.support.engine.client import AttachClient, submission
from tests.support.engine.process import END_TIMEOUT_S, EngineProcess, engine_process
from tests.support.processes import is_alive


@pytest.fixture(scope="module")
def model_dir(servable: Callable[..., Path]) -> Path:
    return servable()


def two_ranks(folder: Path, *flags: object) -> AbstractAsyncContextManager[EngineProcess]:
    return engine_process(folder, "-tp", "2", "--kv-cache-memory-bytes", "1M", *flags)


async def follower_pid(engine: EngineProcess) -> int:
    match = re.search(r"rank 1 \(process (\d+)\)", await engine.said("rank 1 (process"))
    assert match is not None
    return int(match[1])


async def test_it_serves_and_a_drain_ends_both(tmp_path: Path, model_dir: Path) -> None:
    ignoring_end = pb.TokenStops(ignore_end_token=True)
    async with two_ranks(tmp_path, "--model", model_dir) as engine:
        follower = await follower_pid(engine)
        await engine.said("serving on unix:")
        async with AttachClient.open(engine.address) as client:
            prompts = {handle: [handle, 3 * handle, 7] for handle in range(1, 5)}
            together = await client.generate(*(submission(h, p, 8, stops=ignoring_end) for h, p in prompts.items()))
            (alone,) = await client.generate(submission(99, prompts[3], 8, stops=ignoring_end))
            assert {len(answer.token_ids) for answer in together} == {8}
            assert alone.token_ids == together[2].token_ids
        async with AttachClient.open(engine.address, acks=False) as client:
            await client.submit(submission(1, [5], 20, stops=ignoring_end, token_credit=1))
            await client.until(lambda: client.received[1].token_ids)
            engine.signal(signal.SIGTERM)
            await client.until(lambda: client.drains)
            await client.grant(1, 19)
            (last,) = await client.ended(1)
            assert len(last.token_ids) == 20
        assert await engine.ended() == 0
    assert not is_alive(follower)
    assert engine.complaints == []
    assert "drained: 1 requests" in "".join(engine.lines)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("is_busy", [True, False], ids=["in a step", "idle"])
async def test_a_killed_follower_ends_the_engine_with_one_line(tmp_path: Path, model_dir: Path, is_busy: bool) -> None:
    async with two_ranks(tmp_path, "--model", model_dir, "--max-num-seqs", 1) as engine:
        follower = await follower_pid(engine)
        await engine.said("serving on unix:")
        async with AttachClient.open(engine.address, acks=False) as client:
            if is_busy:  # for many seconds: one after the other
                ignoring_end = pb.TokenStops(ignore_end_token=True)
                await client.submit(*(submission(handle, [5], 500, stops=ignoring_end) for handle in range(1, 21)))
                await client.until(lambda: client.received[1].token_ids)
            os.kill(follower, signal.SIGKILL)
            if is_busy:
                (answer,) = await client.ended(20)
                assert answer.completion is not None
                assert answer.completion.reason == pb.COMPLETION_REASON_ENGINE_ERROR
                assert "was killed by SIGKILL" in answer.completion.detail
        assert await engine.ended() == 1
    expected = f"chairlift-engine: error: rank 1 (process {follower}) was killed by SIGKILL\n"
    assert engine.complaints == [expected]
    assert "Traceback" not in "".join(engine.lines)


async def test_a_killed_rank_0_ends_its_follower(tmp_path: Path, model_dir: Path) -> None:
    async with two_ranks(tmp_path, "--model", model_dir) as engine:
        follower = await follower_pid(engine)
        await engine.said("serving on unix:")
        async with AttachClient.open(engine.address) as client:
            await client.submit(submission(1, [5], 500, stops=pb.TokenStops(ignore_end_token=True)))
            await client.until(lambda: client.received[1].token_ids)
            engine.signal(signal.SIGKILL)
            # Its standard error is the follower's too: it ends when both are gone.
            assert await engine.ended() == -signal.SIGKILL
            with contextlib.suppress(grpc.RpcError):
                await client.ended(1)
    assert has_ended(follower)
    assert "Traceback" not in "".join(engine.lines)


def has_ended(pid: int) -> bool:
    """Waits for the end of a process, which closes its files a moment before."""
    try:
        process = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([process], [], [], END_TIMEOUT_S)[0])
    finally:
        os.close(process)


@pytest.mark.slow
async def test_a_follower_that_hangs_ends_the_engine_with_one_line(tmp_path: Path, model_dir: Path) -> None:
    async with two_ranks(tmp_path, "--model", model_dir, "--rank-timeout", "15") as engine:
        follower = await follower_pid(engine)
        await engine.said("serving on unix:")
        async with AttachClient.open(engine.address) as client:
            os.kill(follower, signal.SIGSTOP)  # so that it does not notice the end of rank 0 either
            await client.submit(submission(1, [5], 8))
            (answer,) = await client.ended(1)
            assert answer.completion is not None
            assert answer.completion.reason == pb.COMPLETION_REASON_ENGINE_ERROR
        assert await engine.ended() == 1
    (line,) = engine.complaints
    assert re.search(rf"rank 0 has waited more than 15 s for step \d+: rank 1 \(process {follower}\) hangs", line)
    assert has_ended(follower)


@pytest.mark.slow
async def test_a_signal_while_loading_ends_both(tmp_path: Path, model_dir: Path) -> None:
    async with two_ranks(tmp_path, "--model", model_dir) as engine:
        follower = await follower_pid(engine)
        engine.signal(signal.SIGTERM)
        assert await engine.ended() == 0
    assert has_ended(follower)
    assert engine.complaints == []


@pytest.mark.slow
async def test_a_signal_while_the_ranks_connect_ends_both(tmp_path: Path, model_dir: Path) -> None:
    """The signal takes effect when the library returns, which frees the connections: the follower fails by that."""
    async with two_ranks(tmp_path, "--model", model_dir) as engine:
        follower = await follower_pid(engine)
        os.kill(follower, signal.SIGSTOP)
        await engine.said("starting 2 ranks ...")
        engine.signal(signal.SIGTERM)
        os.kill(follower, signal.SIGCONT)
        assert await engine.ended() == 0
    assert has_ended(follower)
    assert engine.complaints == []
    assert "Traceback" not in "".join(engine.lines)


@pytest.mark.slow
async def test_a_broken_checkpoint_found_by_both_ranks_is_reported_in_one_line(tmp_path: Path, model_dir: Path) -> None:
    path = tmp_path / "broken"
    shutil.copytree(model_dir, path)
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    async with two_ranks(tmp_path, "--model", path, "--log-level", "error") as engine:
        assert await engine.ended() == 2
    (line,) = engine.complaints
    assert str(weights) in line
    assert "Traceback" not in "".join(engine.lines)


@pytest.mark.slow
async def test_a_number_of_heads_that_does_not_divide_is_reported_in_one_line(tmp_path: Path, model_dir: Path) -> None:
    async with two_ranks(tmp_path, "--model", model_dir, "-tp", "3", "--log-level", "error") as engine:
        assert await engine.ended() == 2
    assert engine.complaints == [
        "chairlift-engine: error: num_attention_heads 4 is not a multiple of tensor_parallel_size 3\n"
    ]
