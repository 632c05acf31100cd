"""Outcomes of gRPC calls."""

from typing import Any

import grpc
import pytest


async def failure(call: Any) -> grpc.aio.AioRpcError:
    """Reads a stream to its end and returns its error.

    Raises: pytest.fail.Exception: it has none.
    """
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        async for _ in call:
            pass
    return caught.value
