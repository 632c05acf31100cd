"""Tests that a test's log has nothing of the gRPC calls that former tests left open."""

import asyncio

import grpc
import pytest

from tests.hang import HANG_S

UNREACHABLE = "127.0.0.1:1"


def test_a_call_of_a_closed_event_loop_is_not_an_error_of_the_next_one(caplog):
    left = []

    async def leave_a_call_open():
        channel = grpc.aio.insecure_channel(UNREACHABLE)
        left.append((channel, channel.unary_unary("/x/y")(b"", timeout=1, wait_for_ready=True)))
        await asyncio.sleep(0)  # the call starts

    async def call():
        async with grpc.aio.insecure_channel(UNREACHABLE) as channel:
            # The deadline of the second call is after that of the call that was left open.
            for _ in range(2):
                with pytest.raises(grpc.aio.AioRpcError):
                    await asyncio.wait_for(channel.unary_unary("/x/y")(b"", timeout=1, wait_for_ready=True), HANG_S)

    loop = asyncio.new_event_loop()
    loop.run_until_complete(leave_a_call_open())
    loop.close()
    asyncio.run(call())
    assert not caplog.records
