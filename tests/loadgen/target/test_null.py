import time

import numpy as np
import pytest

from loadgen.errors import TargetError
from loadgen.target.base import PlannedRequest, TargetSpec
from loadgen.target.null import NullPace, NullTarget
from loadgen.target.probe import Tally


async def send(url: str, num_output_tokens: int) -> tuple[Tally, float]:
    target, tally = NullTarget(TargetSpec(url, "null")), Tally()
    assert (await target.probe()).vocab_size == 32_000
    before_s = time.monotonic()
    planned = PlannedRequest(0, np.zeros(7, dtype=np.uint32), None, num_output_tokens)
    await target.send(target.prepare(planned), tally)
    await target.close()
    return tally, time.monotonic() - before_s


@pytest.mark.parametrize("url", ["null:", "null:?tokens=4"])
async def test_it_answers_in_full(url: str) -> None:
    tally, _ = await send(url, 9)
    assert (tally.num_input_tokens, tally.num_tokens, tally.num_counted_tokens) == (7, 9, 9)


async def test_it_keeps_the_pace_it_is_told() -> None:
    assert (await send("null:?ttft_ms=50&itl_ms=20", 4))[1] >= 0.11
    assert (await send("null:?busy_ms=60", 1))[1] >= 0.06


@pytest.mark.parametrize("query", ["speed=1", "ttft_ms=fast", "itl_ms=-1", "tokens=0", "tokens="])
def test_other_queries_are_refused(query: str) -> None:
    with pytest.raises(TargetError, match=query):
        NullPace.of(f"null:?{query}")
