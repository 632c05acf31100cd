"""What holds for every server: run against mocks whose answers are known."""

import asyncio
import hashlib
import itertools
import socket
import time
from collections.abc import Iterator

import numpy as np
import pytest

from loadgen.errors import TargetError
from loadgen.mock.behaviour import MockBehaviour
from loadgen.mock.engine import MockEngine
from loadgen.processes import held_port
from loadgen.target.base import PlannedRequest, RequestFailedError, RequestTimedOutError, Target, TargetSpec
from loadgen.target.open import open_target
from tests.hang import HANG_S

SERVED = ["grpc", "completions", "chat"]
QUICK = MockBehaviour(ttft_s=0.0, itl_s=0.0)


class Notes:
    """A Sink that keeps everything, with times."""

    def __init__(self) -> None:
        self.events: list[tuple[str, float, tuple[int, ...]]] = []
        self.counts: list[int] = []

    def _note(self, name: str, *values: int) -> None:
        self.events.append((name, time.monotonic(), values))

    def sent(self) -> None:
        self._note("sent")

    def started(self, num_input_tokens: int, num_cached_tokens: int) -> None:
        self._note("started", num_input_tokens, num_cached_tokens)

    def tokens(self, count: int) -> None:
        assert count > 0
        self.counts.append(count)
        self._note("tokens", count)

    def finished(
        self, num_output_tokens: int, *, queued_us: int = -1, prefill_us: int = -1, num_preemptions: int = -1
    ) -> None:
        self._note("finished", num_output_tokens, queued_us, prefill_us, num_preemptions)

    def values(self, name: str) -> tuple[int, ...]:
        (values,) = [values for event, _, values in self.events if event == name]
        return values


def request(num_output_tokens: int, num_input_tokens: int = 10, text: bool = False) -> PlannedRequest:
    if text:
        return PlannedRequest(0, None, " ".join(["word"] * num_input_tokens), num_output_tokens)
    return PlannedRequest(0, np.arange(5, 5 + num_input_tokens, dtype=np.uint32), None, num_output_tokens)


async def answered(target: Target, planned: PlannedRequest) -> Notes:
    notes = Notes()
    await target.send(target.prepare(planned), notes)
    return notes


@pytest.mark.parametrize("api", SERVED)
async def test_the_probe_learns_what_is_served(open_mock, api) -> None:
    behaviour = MockBehaviour(ttft_s=0.0, itl_s=0.0, model="some-model", max_model_len=4096, vocab_size=777)
    target, server = await open_mock(api, behaviour)
    facts = await target.probe()
    assert (facts.model, facts.max_model_len, facts.vocab_size) == ("some-model", 4096, 777)
    assert facts.special_ids == ({776} if api == "grpc" else set())
    assert [(seen.num_asked, seen.num_input_tokens) for seen in server.record.requests] == [(4, 8)]


@pytest.mark.parametrize("api", SERVED)
@pytest.mark.parametrize("tokens_per_message", [1, 4])
async def test_every_token_and_count_arrives(open_mock, api, tokens_per_message) -> None:
    behaviour = MockBehaviour(ttft_s=0.0, itl_s=0.0, tokens_per_message=tokens_per_message, cached_share=0.5)
    target, server = await open_mock(api, behaviour)
    await target.probe()
    notes = await answered(target, request(11, text=api == "chat"))
    assert notes.counts == ([1] * 11 if tokens_per_message == 1 else [1, 4, 4, 2])
    assert notes.values("started") == (10, 5)
    assert notes.values("finished")[0] == 11
    assert notes.events[0][0] == "sent"
    assert notes.events[-1][0] == "finished"
    if api == "grpc":
        assert notes.values("finished")[1:] == (0, 0, 0)
    assert [(seen.num_input_tokens, seen.num_asked, seen.outcome) for seen in server.record.answered()] == [
        (10, 11, "done")
    ]


@pytest.mark.parametrize("api", ["grpc", "completions"])
async def test_token_ids_arrive_as_they_are(open_mock, api) -> None:
    target, server = await open_mock(api)
    await target.probe()
    planned = request(5, 2000)
    await answered(target, planned)
    assert planned.token_ids is not None
    (seen,) = server.record.answered()
    assert seen.prompt_sha256 == hashlib.sha256(planned.token_ids.astype("<u4").tobytes()).hexdigest()


@pytest.mark.parametrize("api", SERVED)
async def test_text_arrives_as_it_is_and_is_counted(open_mock, api) -> None:
    behaviour = MockBehaviour(ttft_s=0.0, itl_s=0.0, overhead_tokens=7, long_word=5)
    target, server = await open_mock(api, behaviour, prompt_mode="text")
    await target.probe()
    notes = await answered(target, request(5, 20, text=True))
    assert notes.values("started")[0] == 27
    assert server.record.answered()[0].prompt_sha256 == hashlib.sha256(b" ".join([b"word"] * 20)).hexdigest()
    assert await target.count_tokens("some longest words") == 7 + 4


@pytest.mark.parametrize("api", ["completions", "chat"])
async def test_without_running_counts_a_message_is_a_token_and_usage_tells_the_truth(open_mock, api) -> None:
    behaviour = MockBehaviour(ttft_s=0.0, itl_s=0.0, tokens_per_message=4, counts_as_it_goes=False)
    target, _ = await open_mock(api, behaviour)
    await target.probe()
    notes = await answered(target, request(9, text=api == "chat"))
    assert notes.counts == [1, 1, 1]
    assert notes.values("finished")[0] == 9


@pytest.mark.parametrize("api", SERVED)
async def test_messages_are_noted_when_they_come(open_mock, api, monkeypatch) -> None:
    """One by one, not in heaps: each leaves only when the one before it has been noted."""
    target, _ = await open_mock(api, MockBehaviour(ttft_s=0.0, itl_s=1.0))
    target._model = "mock"
    notes, left_s = Notes(), []

    async def until(engine: MockEngine, arrived_ns: int, due_s: float) -> None:
        while len(notes.counts) < due_s:
            await asyncio.sleep(0.001)
        left_s.append(time.monotonic())

    monkeypatch.setattr(MockEngine, "_until", until)
    async with asyncio.timeout(HANG_S):
        await target.send(target.prepare(request(6, text=api == "chat")), notes)
    noted_s = [at_s for name, at_s, _ in notes.events if name == "tokens"]
    assert len(noted_s) == 6
    moments = [notes.events[0][1], *itertools.chain(*zip(left_s, noted_s, strict=True))]
    assert moments == sorted(moments)  # sent, and then in turn: a message leaves, it is noted


@pytest.mark.parametrize("api", SERVED)
async def test_a_refused_request_and_one_that_breaks_off_fail_with_the_servers_words(open_mock, api) -> None:
    target, server = await open_mock(api, MockBehaviour(ttft_s=0.0, itl_s=0.0, error_rate=1.0))
    await target.probe()
    errors = []
    for _ in range(12):
        with pytest.raises(RequestFailedError) as failure:
            await answered(target, request(6, text=api == "chat"))
        errors.append(str(failure.value))
    assert len(set(errors)) == 2  # at once, and after three messages: no text of its own for each request
    assert any("mock failure after 0 messages" in error for error in errors)
    assert any("mock failure after 3 messages" in error for error in errors)
    assert {seen.outcome for seen in server.record.answered()} == {"failed"}


@pytest.mark.parametrize("api", SERVED)
async def test_a_request_without_an_end_times_out(open_mock, api) -> None:
    """The machine may stall so long that the deadline passes before the first message, or before the server has it."""
    target, server = await open_mock(api, MockBehaviour(ttft_s=0.0, itl_s=3600.0), timeout_s=1.0)
    target._model = "mock"
    notes = Notes()
    with pytest.raises(RequestTimedOutError):
        await target.send(target.prepare(request(1000, text=api == "chat")), notes)
    assert notes.counts in ([], [1])
    await closed(server)
    assert [seen.outcome for seen in server.record.answered()] in ([], ["cancelled"])


@pytest.mark.parametrize("api", SERVED)
async def test_cancelling_the_coroutine_cancels_the_call(open_mock, api) -> None:
    target, server = await open_mock(api, MockBehaviour(ttft_s=0.0, itl_s=0.05))
    target._model = "mock"
    arrived = asyncio.Event()
    notes = Notes()
    notes.tokens = lambda count: arrived.set()  # type: ignore[method-assign]
    task = asyncio.create_task(target.send(target.prepare(request(1000, text=api == "chat")), notes))
    await arrived.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await closed(server)
    assert server.record.answered()[0].outcome == "cancelled"
    assert server.record.answered()[0].num_sent < 1000


@pytest.mark.parametrize("api", SERVED)
async def test_a_call_whose_notes_go_wrong_is_not_left_running(open_mock, api) -> None:
    target, server = await open_mock(api, MockBehaviour(ttft_s=0.0, itl_s=0.05))
    target._model = "mock"
    notes = Notes()
    notes.tokens = lambda count: 1 // 0  # type: ignore[assignment,return-value]
    with pytest.raises(ZeroDivisionError):
        await target.send(target.prepare(request(1000, text=api == "chat")), notes)
    await closed(server)
    assert server.record.answered()[0].outcome == "cancelled"


@pytest.mark.parametrize("api", SERVED)
async def test_more_than_a_hundred_streams_are_open_at_once_on_the_server(open_mock, api) -> None:
    target, server = await open_mock(api, MockBehaviour(ttft_s=3600.0, itl_s=0.0))
    target._model = "mock"
    streams = [asyncio.create_task(answered(target, request(5, text=api == "chat"))) for _ in range(230)]
    async with asyncio.timeout(HANG_S):
        while server.record.num_open < len(streams):
            await asyncio.wait(streams, timeout=0.02)
            assert not any(stream.done() for stream in streams)
    for stream in streams:
        stream.cancel()
    await asyncio.wait(streams)
    if api == "grpc":
        assert len(target._connections) >= 4
        assert [connection.num_streams for connection in target._connections] == [0] * len(target._connections)


@pytest.mark.parametrize("api", SERVED)
async def test_an_unknown_model_is_named_with_those_there_are(open_mock, api) -> None:
    target, _ = await open_mock(api, QUICK, model="gpt-99")
    with pytest.raises(TargetError, match=r"gpt-99.*mock"):
        await target.probe()


@pytest.mark.parametrize("api", SERVED)
async def test_a_server_that_sends_too_few_tokens_is_found_by_the_probe(open_mock, api) -> None:
    short = MockBehaviour(ttft_s=0.0, itl_s=0.0, output_share=0.5, spares_probes=False)
    target, _ = await open_mock(api, short)
    with pytest.raises(TargetError, match=r"asked for exactly 4 tokens and sent 2.*--no-ignore-eos"):
        await target.probe()
    lenient, _ = await open_mock(api, short, ignore_eos=False)
    assert (await lenient.probe()).model == "mock"


@pytest.mark.parametrize("api", SERVED)
async def test_a_server_that_cannot_generate_is_found_by_the_probe(open_mock, api) -> None:
    target, _ = await open_mock(api, MockBehaviour(error_rate=1.0, spares_probes=False))
    with pytest.raises(TargetError, match=r"refused a request of 4 tokens: .*mock failure"):
        await target.probe()


@pytest.mark.parametrize("api", SERVED)
async def test_unreachable_server_is_reported_at_once(unused_address: str, api) -> None:
    async with opened(api, unused_address) as target:
        with pytest.raises(TargetError, match=r"no server (answers|listens) at .*refused.*start the server") as raised:
            await target.probe()
    assert "ssl" not in str(raised.value)


@pytest.mark.parametrize("api", SERVED)
async def test_a_half_dead_server_is_given_up(api) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:  # the kernel takes connections, nobody reads them
        async with opened(api, address_of(listener), probe_timeout_s=0.5) as target:
            with pytest.raises(TargetError, match=r"(does not|gives no) answer .*within 0.5 s"):
                await target.probe()


@pytest.mark.parametrize("api", SERVED)
async def test_a_server_of_another_kind_is_refused(open_mock, api) -> None:
    _, other = await open_mock("completions" if api == "grpc" else "grpc")
    address = other.url.removesuffix("/v1").partition("//")[2]
    async with opened(api, address) as target:
        with pytest.raises(TargetError, match=f"{address}.*--target {other.url}$") as raised:
            await target.probe()
    assert "\\x" not in str(raised.value)


async def test_https_to_a_server_without_tls_says_so(open_mock) -> None:
    _, other = await open_mock("completions")
    target = open_target(TargetSpec(other.url.replace("http:", "https:"), "completions"), probe_timeout_s=HANG_S)
    with pytest.raises(TargetError, match=r"cannot be reached with TLS: write http://"):
        await target.probe()
    await target.close()


class opened:  # noqa: N801 - reads as the function it stands for
    """A target at an address, closed at the end."""

    def __init__(self, api, address: str, probe_timeout_s: float = HANG_S) -> None:
        url = f"grpc://{address}" if api == "grpc" else f"http://{address}/v1"
        self._spec = TargetSpec(url, api, prompt_mode="text" if api == "chat" else "ids")
        self._timeout_s = probe_timeout_s

    async def __aenter__(self) -> Target:
        self._target = open_target(self._spec, probe_timeout_s=self._timeout_s)
        return self._target

    async def __aexit__(self, *_: object) -> None:
        await self._target.close()


@pytest.fixture
def unused_address() -> Iterator[str]:
    with held_port() as port:
        yield f"127.0.0.1:{port}"


def address_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()
    return f"{host}:{port}"


async def closed(server) -> None:
    """Until the server has noticed that the client is gone."""
    while server.record.num_open:
        await asyncio.sleep(0.01)
