"""The load before the gateways: as many streams as it says, each with all its tokens and with a prompt of its own."""

import asyncio

import pytest

from loadgen.errors import TargetError
from loadgen.experiments.gateways.comparison import Case, _Cost, _per_token_and_request, _results
from loadgen.experiments.gateways.streams import Load, Stream, run_load


class Gateway:
    """Counts the streams that are open at once; each waits until `most` are."""

    def __init__(self, most: int, lost: int = 0) -> None:
        self.prompts: list[str] = []
        self._all = asyncio.Barrier(most)
        self._lost = lost

    async def stream(self, prompt: str, max_tokens: int) -> Stream:
        self.prompts.append(prompt)
        await self._all.wait()
        return Stream(0.5 + len(self.prompts), max_tokens - self._lost)


async def test_all_streams_of_a_turn_are_open_at_once() -> None:
    gateway = Gateway(8)
    times = await run_load(Load(8, 3, 5, 0.0), gateway.stream, 16, seed=1)
    assert len(times) == 24
    assert {len(prompt) for prompt in gateway.prompts} == {16}
    assert len({prompt[:16] for prompt in gateway.prompts}) == 24


async def test_an_answer_that_lacks_tokens_is_an_error() -> None:
    with pytest.raises(TargetError, match="an answer has 4 tokens instead of 5"):
        await run_load(Load(1, 1, 5, 0.0), Gateway(1, lost=1).stream, 16, seed=1)


def test_tokens_and_requests_are_separated_by_two_lengths() -> None:
    case = Case(1, Load(5, 2, 3, 0.0), Load(4, 1, 13, 0.0))
    token_s, request_s = 0.25, 7.0
    short_s, long_s = 10 * (request_s + 3 * token_s), 4 * (request_s + 13 * token_s)
    assert _per_token_and_request(case, 100.0, 100.0 + short_s, 100.0 + short_s + long_s) == (token_s, request_s)


def test_figures_are_medians_of_the_rounds() -> None:
    rounds = [_Cost(3.0, 100.0, 7.0, (4.0,)), _Cost(5.0, 120.0, 9.0, (6.0, 8.0))]
    assert [result.figure for result in _results("smg, 8", rounds)] == [4.0, 8.0, 110.0, 5.5]
    assert [result.figure for result in _results("direct, 8", rounds)] == [5.5]
