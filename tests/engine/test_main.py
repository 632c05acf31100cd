"""`python -m engine` as a process: it serves, drains, and reports start-up errors in one line."""

import json
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from chairlift.engine.v1 import engine_service_pb2 as pb
from tests.hang import HANG_S
from tests.support.engine.client import AttachClient, engine_status, submission
from tests.support.engine.process import ENVIRONMENT, engine_process


@pytest.fixture(scope="module")
def model_dir(servable: Callable[..., Path]) -> Path:
    return servable()


def run(*flags: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "engine", *map(str, flags)],
        capture_output=True,
        text=True,
        timeout=HANG_S,
        env=ENVIRONMENT,
        cwd=cwd,
        check=False,
    )


async def test_it_serves_a_model_drains_and_exits_with_zero(tmp_path: Path, model_dir: Path) -> None:
    step_log = tmp_path / "steps.jsonl"
    flags = ("--model", model_dir, "--step-log", step_log, "--max-num-seqs", 8, "--kv-cache-memory-bytes", "1M")
    async with engine_process(tmp_path, *flags) as process:
        await process.said("serving on unix:")
        said = "".join(process.lines)
        # 2 (K and V) * 2 layers * 2 KV heads * 16 * 4 bytes; 1 MiB holds 2048 tokens of them.
        assert "512 bytes per token" in said
        assert "KV cache size: 2,048 tokens (128 blocks of 16)" in said
        assert "Maximum concurrency for 512 tokens per request: 4.00x" in said
        status = await engine_status(process.address)
        assert (status.info.model, status.info.max_model_len, status.info.vocab_size) == ("tiny-llama", 512, 211)
        async with AttachClient.open(process.address) as client:
            ignoring_end = pb.TokenStops(ignore_end_token=True)
            prompts = {handle: [handle, 3 * handle, 7] for handle in range(1, 8)}
            together = await client.generate(*(submission(h, p, 8, stops=ignoring_end) for h, p in prompts.items()))
            (alone,) = await client.generate(submission(99, prompts[7], 8, stops=ignoring_end))
            assert {len(answer.token_ids) for answer in together} == {8}
            assert alone.token_ids == together[6].token_ids
        async with AttachClient.open(process.address, acks=False) as client:
            await client.submit(submission(1, [5], 50, stops=ignoring_end, token_credit=1))
            await client.until(lambda: client.received[1].token_ids)
            process.signal(signal.SIGTERM)
            await client.until(lambda: client.drains)
            await client.grant(1, 49)
            (last,) = await client.ended(1)
            assert len(last.token_ids) == 50
            assert [notice.grace.seconds for notice in client.drains] == [30]
        assert await process.ended() == 0
    assert "drained: 1 requests finished, 0 cancelled" in process.lines[-1]
    assert not (tmp_path / "engine.sock").exists()
    steps = [json.loads(line) for line in step_log.read_text().splitlines()]
    assert sum(len(step["finished"]) for step in steps) == 9
    assert steps[-1]["blocks_used"] == 0


async def test_a_second_signal_does_not_wait_for_the_drain(tmp_path: Path, model_dir: Path) -> None:
    flags = ("--model", model_dir, "--load-format", "dummy", "--kv-cache-memory-bytes", "1M")
    async with engine_process(tmp_path, *flags) as process:
        await process.said("serving on unix:")
        async with AttachClient.open(process.address) as client:
            assert client.welcome.info.weights_revision == "dummy-0"
            await client.submit(submission(1, [5], 400, token_credit=1))
            await client.until(lambda: client.received[1].token_ids)
            process.signal(signal.SIGINT)
            await client.until(lambda: client.drains)
            process.signal(signal.SIGTERM)  # another one: a second SIGINT would be the same for a second
            (answer,) = await client.ended(1)
            assert answer.completion is not None
            assert answer.completion.reason == pb.COMPLETION_REASON_CANCELLED
        assert await process.ended() == 0


async def test_it_exits_when_its_parent_closes_stdin(tmp_path: Path, model_dir: Path) -> None:
    async with engine_process(tmp_path, "--model", model_dir, "--exit-on-stdin-close") as process:
        await process.said("serving on unix:")
        process.close_stdin()
        assert await process.ended() == 0
    assert "drained: no requests were open" in process.lines[-1]


def test_a_misspelt_variable_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ENVIRONMENT, "CHAIRLIFT_MAX_NUM_SEQ", "7")
    said = run("--model", tmp_path / "absent", cwd=tmp_path).stderr
    assert "WARNING chairlift.service.variables: environment variable CHAIRLIFT_MAX_NUM_SEQ has no effect" in said
    assert "did you mean CHAIRLIFT_MAX_NUM_SEQS?" in said


@pytest.fixture
def endless_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A model on a hub that accepts connections and never answers."""
    with socket.create_server(("127.0.0.1", 0)) as hub:
        monkeypatch.setitem(ENVIRONMENT, "HF_ENDPOINT", f"http://127.0.0.1:{hub.getsockname()[1]}")
        monkeypatch.setitem(ENVIRONMENT, "HF_HUB_OFFLINE", "0")
        monkeypatch.setitem(ENVIRONMENT, "HF_HOME", str(tmp_path / "hub"))
        monkeypatch.setitem(ENVIRONMENT, "HF_HUB_ETAG_TIMEOUT", "600")
        monkeypatch.setitem(ENVIRONMENT, "HF_HUB_DOWNLOAD_TIMEOUT", "600")
        yield "owner/endless"


async def test_it_stops_loading_when_its_parent_closes_stdin(tmp_path: Path, endless_model: str) -> None:
    async with engine_process(tmp_path, "--model", endless_model, "--exit-on-stdin-close") as process:
        await process.said("loading")
        process.close_stdin()
        assert await process.ended() == 0
    assert "stopped while loading" in process.lines[-1]


async def test_its_status_is_loading_while_it_loads(tmp_path: Path, endless_model: str) -> None:
    async with engine_process(tmp_path, "--model", endless_model) as process:
        await process.said("loading")
        status = (await engine_status(process.address)).status
        assert status.state == pb.ENGINE_STATE_LOADING
        assert status.detail


def test_the_log_level_applies_to_the_engine_and_not_to_its_libraries() -> None:
    code = """
import logging
from chairlift.service.logs import log_to_stderr
from tests.hang import HANG_S
log_to_stderr("chairlift-engine", "debug", "text")
logging.getLogger("engine.step_loop").debug("ours")
logging.getLogger("numba.core.byteflow").debug("noise: hundreds of lines for each kernel that is compiled")
logging.getLogger("httpx").info("noise: each request of a download")
logging.getLogger("httpx").warning("trouble")
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=ENVIRONMENT, check=True)
    assert [line.split(": ")[-1] for line in result.stderr.splitlines()] == ["ours", "trouble"]


def test_a_bad_flag_and_a_port_in_use_are_reported(tmp_path: Path) -> None:
    bad = run("--port", "99999", cwd=tmp_path)
    assert (bad.returncode, bad.stdout) == (2, "")
    assert "--port" in bad.stderr
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = run("--port", port, "--log-level", "error", cwd=tmp_path)
    assert result.returncode == 2
    assert f"cannot listen on 127.0.0.1:{port}" in result.stderr
    assert "Traceback" not in result.stderr
