"""`python -m engine --nnodes 2` on two machines: they serve as one engine, and end together, with one line each."""

import asyncio
import contextlib
import re
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from chairlift.engine.v1 import engine_service_pb2 as pb
from engine.parallel.nodes import free_port
from tests.support.engine.client import AttachClient, submission
from tests.support.engine.process import EngineProcess, engine_process
from tests.support.processes import child_pids, kill
from tests.support.slow_link import TwoHosts, can_make_hosts, two_hosts

IGNORING_END = pb.TokenStops(ignore_end_token=True)
PROMPTS = {handle: [handle, 3 * handle, 7] for handle in range(1, 5)}
Two = tuple[EngineProcess, EngineProcess]


@pytest.fixture(scope="module")
def model_dir(servable: Callable[..., Path]) -> Path:
    return servable()


@contextlib.asynccontextmanager
async def two_nodes(folder: Path, model_dir: Path, *flags: object, hosts: TwoHosts | None = None) -> AsyncIterator[Two]:
    address = f"127.0.0.1:{free_port('127.0.0.1')}" if hosts is None else f"{hosts.addresses[0]}:29500"
    prefixes = [() if hosts is None else hosts.prefix(index) for index in range(2)]
    shared = (
        *("--model", model_dir, "-pp", 2, "--nnodes", 2, "--master-addr", address),
        *("--kv-cache-memory-bytes", "1M", *flags),
    )
    for name in ("0", "1"):
        (folder / name).mkdir()
    async with (
        engine_process(folder / "1", *shared, "--node-rank", 1, prefix=prefixes[1]) as second,
        engine_process(folder / "0", *shared, prefix=prefixes[0]) as first,
    ):
        yield first, second


async def alone(folder: Path, model_dir: Path, num_tokens: int) -> list[list[int]]:
    """What one process answers to `PROMPTS`."""
    folder.mkdir()
    async with engine_process(folder, "--model", model_dir, "--kv-cache-memory-bytes", "1M") as engine:
        await engine.said("serving on unix:")
        async with AttachClient.open(engine.address) as client:
            return await answers(client, num_tokens)


async def answers(client: AttachClient, num_tokens: int) -> list[list[int]]:
    submissions = (submission(h, p, num_tokens, stops=IGNORING_END) for h, p in PROMPTS.items())
    return [answer.token_ids for answer in await client.generate(*submissions)]


async def ended(nodes: Two) -> tuple[int, int]:
    first, second = await asyncio.gather(*(node.ended() for node in nodes))
    return first, second


async def test_they_serve_as_one_and_a_drain_of_either_ends_both(tmp_path: Path, model_dir: Path) -> None:
    wanted = await alone(tmp_path / "alone", model_dir, 8)
    async with two_nodes(tmp_path, model_dir) as nodes:
        await nodes[0].said("serving on unix:")
        async with AttachClient.open(nodes[0].address, acks=False) as client:
            assert await answers(client, 8) == wanted
            await client.submit(submission(9, [5], 20, stops=IGNORING_END, token_credit=1))
            await client.until(lambda: client.received[9].token_ids)
            nodes[1].signal(signal.SIGTERM)
            await client.until(lambda: client.drains)
            await client.grant(9, 19)
            (last,) = await client.ended(9)
            assert len(last.token_ids) == 20
        assert await ended(nodes) == (0, 0)
    assert nodes[0].complaints == nodes[1].complaints == []
    assert "drained: 1 requests" in "".join(nodes[0].lines)


@pytest.mark.parametrize("killed", [0, 1])
async def test_kill_9_of_either_ends_the_other_with_one_line(tmp_path: Path, model_dir: Path, killed: int) -> None:
    async with two_nodes(tmp_path, model_dir, "--max-num-seqs", 1) as nodes:
        await nodes[0].said("serving on unix:")
        async with AttachClient.open(nodes[0].address, acks=False) as client:
            await client.submit(*(submission(handle, [5], 500, stops=IGNORING_END) for handle in range(1, 21)))
            await client.until(lambda: client.received[1].token_ids)
            nodes[killed].signal(signal.SIGKILL)
            if killed == 1:
                (answer,) = await client.ended(20)
                assert answer.completion is not None
                assert answer.completion.reason == pb.COMPLETION_REASON_ENGINE_ERROR
                assert "node 1 (127.0.0.1)" in answer.completion.detail
            statuses = await ended(nodes)
    assert statuses == ((-signal.SIGKILL, 1) if killed == 0 else (1, -signal.SIGKILL))
    (line,) = nodes[1 - killed].complaints
    assert re.search(rf"node {killed} \(127\.0\.0\.1\)(: rank 1 .*)? has (ended|left the group), or cannot be", line)


async def test_kill_9_of_a_rank_ends_both_machines_with_one_line_that_names_it(tmp_path: Path, model_dir: Path) -> None:
    async with two_nodes(tmp_path, model_dir, "--max-num-seqs", 1) as nodes:
        await nodes[0].said("serving on unix:")
        async with AttachClient.open(nodes[0].address, acks=False) as client:
            await client.submit(*(submission(handle, [5], 500, stops=IGNORING_END) for handle in range(1, 21)))
            await client.until(lambda: client.received[1].token_ids)
            (rank,) = child_pids(nodes[1].pid)
            kill(rank)
            statuses = await ended(nodes)
    assert statuses == (1, 1)
    for node, name in zip(nodes, ("node 1 (127.0.0.1): ", ""), strict=True):
        (line,) = node.complaints
        assert f"{name}rank 1 (process {rank}) was killed by SIGKILL" in line


async def test_other_flags_on_one_are_refused_and_the_right_ones_still_join(tmp_path: Path, model_dir: Path) -> None:
    shared = (
        *("--model", model_dir, "-pp", 2, "--nnodes", 2, "--kv-cache-memory-bytes", "1M"),
        *("--master-addr", f"127.0.0.1:{free_port('127.0.0.1')}"),
    )
    for name in ("0", "wrong", "right"):
        (tmp_path / name).mkdir()
    async with engine_process(tmp_path / "0", *shared) as first:
        await first.said("Starting to load")
        async with engine_process(tmp_path / "wrong", *shared, "--node-rank", 1, "--max-num-seqs", 3) as wrong:
            assert await wrong.ended() == 2
        assert wrong.complaints == [
            "chairlift-engine: error: node 1 differs from node 0: --max-num-seqs is 3, there 64\n"
        ]
        async with engine_process(tmp_path / "right", *shared, "--node-rank", 1) as right:
            await first.said("serving on unix:")
            right.signal(signal.SIGTERM)
            assert await ended((first, right)) == (0, 0)


@pytest.mark.slow
@pytest.mark.skipif(not can_make_hosts(), reason="needs root, network namespaces and /dev/net/tun")
async def test_a_slow_and_lossy_network_changes_no_token_and_its_end_is_noticed(
    tmp_path: Path, model_dir: Path
) -> None:
    wanted = await alone(tmp_path / "alone", model_dir, 40)
    with two_hosts(delay_s=0.005, loss=0.01) as hosts:
        async with two_nodes(tmp_path, model_dir, hosts=hosts) as nodes:
            await nodes[0].said("serving on unix:")
            async with AttachClient.open(nodes[0].address) as client:
                assert await answers(client, 40) == wanted
                assert hosts.num_lost > 0
            async with AttachClient.open(nodes[0].address, acks=False) as client:
                await client.submit(submission(99, [5], 500, stops=IGNORING_END))
                await client.until(lambda: client.received[99].token_ids)
                hosts.cut()
                (answer,) = await client.ended(99)
                assert answer.completion is not None
                assert answer.completion.reason == pb.COMPLETION_REASON_ENGINE_ERROR
            assert await ended(nodes) == (1, 1)
        assert "cannot be reached any more" in nodes[0].complaints[0]
        assert "cannot be reached any more" in nodes[1].complaints[0]
        assert len(nodes[0].complaints) == len(nodes[1].complaints) == 1


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--nnodes", 2), "--nnodes 2 needs --master-addr"),
        (("--nnodes", 2, "--master-addr", "127.0.0.1:1"), "--pipeline-parallel-size 1 is not a multiple of --nnodes 2"),
        (("--node-rank", 1), "--node-rank 1 is not below --nnodes 1"),
        (("--master-addr", "here"), "--master-addr is here, it must be HOST:PORT"),
    ],
)
async def test_flags_that_contradict_each_other_are_refused_at_once(
    tmp_path: Path, flags: tuple[object, ...], words: str
) -> None:
    async with engine_process(tmp_path, *flags) as engine:
        assert await engine.ended() == 2
    assert words in "".join(engine.lines)
