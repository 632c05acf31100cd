"""FakeEngine reports its own defects; otherwise a test that waits for it would only time out."""

import asyncio

import pytest


async def test_exception_of_a_background_task_is_raised_by_kill(pair, text_request):
    def broken(step):
        raise ZeroDivisionError

    pair.engine.rewrite_step = broken
    call = pair.stub().StreamGenerate(text_request("abc"))
    await asyncio.wait([pair.engine._tasks[0]])
    call.cancel()
    with pytest.raises(ZeroDivisionError):
        await pair.engine.kill()
    while pair.app.engines.serving:
        await asyncio.sleep(0)


async def test_protocol_violation_is_raised_by_kill(pair, text_request):
    pair.session._outbox._command_seq += 1
    call = pair.stub().StreamGenerate(text_request("abc"))
    while not pair.engine._defects:
        await asyncio.sleep(0)
    call.cancel()
    with pytest.raises(AssertionError, match="a command is missing"):
        await pair.engine.kill()
    while pair.app.engines.serving:
        await asyncio.sleep(0)
