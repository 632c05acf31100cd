"""No peer can write lines or terminal escapes into the engine's log."""

import asyncio
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.engine.process import ENVIRONMENT, engine_process
from tests.support.goaway import goaway

FORGED = "\n2026-01-01 00:00:00.000 INFO engine: forged\n\x1b[2J\x9b31m\u2028"


async def test_no_peer_writes_into_the_log(
    tmp_path: Path, make_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(ENVIRONMENT, "GRPC_VERBOSITY", raising=False)
    model_dir = tmp_path / "model"
    shutil.copytree(make_checkpoint("llama"), model_dir)
    async with engine_process(tmp_path, "--model", model_dir, "--load-format", "dummy") as process:
        await process.said("listening on")
        reader, writer = await asyncio.open_unix_connection(process.address.removeprefix("unix:"))
        writer.write(goaway(FORGED.encode()))
        writer.write_eof()
        await reader.read()  # until the server has taken it, and closes
        writer.close()
        process.signal(signal.SIGTERM)
        await process.ended()
    said = "".join(process.lines)
    assert "forged" not in said
    assert "\x1b" not in said
