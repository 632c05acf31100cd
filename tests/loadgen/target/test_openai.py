"""What only HTTP servers do."""

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web

from frontend.api.http.errors import error_object
from frontend.errors import TargetsInfeasible
from loadgen.errors import TargetError
from loadgen.mock.behaviour import MockBehaviour
from loadgen.mock.http_server import MockHttpServer
from loadgen.target.base import PlannedRequest, RequestFailedError, RequestRefusedError, RequestTargets, TargetSpec
from loadgen.target.open import open_target
from loadgen.target.openai import OpenAiTarget
from loadgen.target.probe import Tally
from tests.hang import HANG_S

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
Serve = Callable[[dict[str, Handler]], Awaitable[str]]


@pytest.fixture
async def serve() -> AsyncIterator[Serve]:
    """serve({"GET /v1/models": handler}): its base address."""
    runners = []

    async def served(handlers: dict[str, Handler]) -> str:
        app = web.Application()
        for route, handler in handlers.items():
            method, path = route.split()
            app.router.add_route(method, path, handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        runners.append(runner)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        return f"http://127.0.0.1:{runner.addresses[0][1]}"

    yield served
    for runner in runners:
        await runner.cleanup()


def answers(value: Any, status: int = 200) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        return web.json_response(value, status=status)

    return handler


def streams(
    *events: bytes, bodies: list[Any] | None = None, accept: Callable[[Any], bool] = lambda body: True
) -> Handler:
    async def handler(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if bodies is not None:
            bodies.append(body)
        if not accept(body):
            return web.json_response({"error": {"message": "unknown option"}}, status=400)
        response = web.StreamResponse()
        await response.prepare(request)
        for event in events:
            await response.write(event)
        return response

    return handler


ANSWER = [
    b'data: {"choices": [{"text": "x", "finish_reason": null}]}\n\n' * 4,
    b'data: {"choices": [{"text": "", "finish_reason": "length"}]}\n\ndata: [DONE]\n\n',
]
ONE_MODEL = answers({"data": [{"id": "m"}]})


async def probe(url: str, **spec: Any) -> OpenAiTarget:
    target = open_target(TargetSpec(url, "completions", **spec), probe_timeout_s=HANG_S)
    assert isinstance(target, OpenAiTarget)
    try:
        await target.probe()
    finally:
        await target.close()
    return target


async def test_requests_say_what_vllm_and_llama_cpp_want(serve: Serve) -> None:
    bodies: list[Any] = []
    url = await serve({"GET /v1/models": ONE_MODEL, "POST /v1/completions": streams(*ANSWER, bodies=bodies)})
    await probe(url + "/v1/")
    assert bodies == [
        {
            "model": "m",
            "prompt": list(range(1000, 1008)),
            "max_tokens": 4,
            "min_tokens": 4,
            "ignore_eos": True,
            "temperature": 0.0,
            "stream": True,
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
        }
    ]


async def test_a_server_that_knows_no_running_usage_is_asked_without(serve: Serve) -> None:
    bodies: list[Any] = []
    knows = streams(*ANSWER, bodies=bodies, accept=lambda body: "continuous_usage_stats" not in body["stream_options"])
    await probe(await serve({"GET /v1/models": ONE_MODEL, "POST /v1/completions": knows}) + "/v1")
    assert [body["stream_options"] for body in bodies] == [
        {"include_usage": True, "continuous_usage_stats": True},
        {"include_usage": True},
    ]


async def test_lengths_are_only_held_if_that_is_wanted(serve: Serve) -> None:
    bodies: list[Any] = []
    url = await serve({"GET /v1/models": ONE_MODEL, "POST /v1/completions": streams(*ANSWER, bodies=bodies)})
    await probe(url + "/v1", ignore_eos=False, temperature=0.5)
    assert not {"ignore_eos", "min_tokens"} & set(bodies[0])
    assert bodies[0]["temperature"] == 0.5


async def test_wrong_paths_are_told_from_wrong_models(serve: Serve) -> None:
    url = await serve({"GET /v1/models": answers({"data": [{"id": "a"}, {"id": "b"}]})})
    with pytest.raises(TargetError, match=r"serves several models.*--model; it lists a, b"):
        await probe(url + "/v1")
    with pytest.raises(TargetError, match="has no model 'c'; it lists a, b"):
        await probe(url + "/v1", model="c")
    with pytest.raises(TargetError, match=r"is no list of models \(HTTP 404\): is the path right \(usually /v1\)"):
        await probe(url)
    with pytest.raises(TargetError, match=r"refused a request.*HTTP 404.*is the path right"):
        await probe(url + "/v1", model="a")


async def test_addresses_that_are_none_are_said_to_be_so() -> None:
    for url in ("http://a..b/v1", "http://user:word@127.0.0.1:9/v1"):
        with pytest.raises(TargetError, match=f"^{url}/models: .*(label empty|Cannot combine)"):
            await probe(url, api_key="key")


async def test_a_server_without_a_list_serves_the_model_that_is_named(serve: Serve) -> None:
    url = await serve({"POST /v1/completions": streams(*ANSWER)})
    assert (await probe(url + "/v1", model="named"))._model == "named"


async def test_a_server_that_takes_ids_for_text_is_found_out(serve: Serve) -> None:
    usage = b'data: {"choices": [], "usage": {"prompt_tokens": 34, "completion_tokens": 4}}\n\n'
    url = await serve({"GET /v1/models": ONE_MODEL, "POST /v1/completions": streams(*ANSWER, usage)})
    with pytest.raises(TargetError, match=r"34 tokens in a prompt of 8 token ids.*--prompt-mode text"):
        await probe(url + "/v1")


async def test_a_sick_server_is_quoted(serve: Serve) -> None:
    url = await serve({"GET /v1/models": answers({"error": {"message": "still loading"}}, 503)})
    with pytest.raises(TargetError, match="HTTP 503: still loading"):
        await probe(url + "/v1")


async def test_keys_come_from_the_environment_or_the_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    server = MockHttpServer(MockBehaviour(ttft_s=0.0, itl_s=0.0), api_key="secret")
    await server.start()
    try:
        monkeypatch.delenv("OPENAI_API_KEY", raising=False)
        with pytest.raises(TargetError, match=r"HTTP 401.*OPENAI_API_KEY"):
            await probe(server.url)
        await probe(server.url, api_key="secret")
        monkeypatch.setenv("OPENAI_API_KEY", "secret")
        await probe(server.url)
    finally:
        await server.close()


async def test_prompts_are_counted_by_usage_where_there_is_no_tokenize(serve: Serve) -> None:
    bodies: list[Any] = []

    async def complete(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        return web.json_response({"choices": [{"text": "x"}], "usage": {"prompt_tokens": 12}})

    url = await serve({"POST /v1/completions": complete})
    target = open_target(TargetSpec(url + "/v1", "completions", model="m"))
    assert [await target.count_tokens("a b"), await target.count_tokens("c")] == [12, 12]
    assert bodies == [{"model": "m", "prompt": "a b", "max_tokens": 1}, {"model": "m", "prompt": "c", "max_tokens": 1}]
    await target.close()


async def test_a_broken_connection_is_the_requests_failure(serve: Serve) -> None:
    async def breaks(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Length": "1000"})
        await response.prepare(request)
        await response.write(ANSWER[0])
        assert request.transport is not None
        request.transport.close()
        return response

    target = open_target(TargetSpec(await serve({"POST /v1/completions": breaks}) + "/v1", "completions", model="m"))
    tally = Tally()
    with pytest.raises(RequestFailedError, match="ClientPayloadError"):
        await target.send(target.prepare(PlannedRequest(0, None, "x", 9)), tally)
    assert tally.num_tokens == 4
    await target.close()


async def test_very_long_prompts_are_sent_without_a_warning(serve: Serve) -> None:
    bodies: list[Any] = []
    app_limit = 4 << 20

    async def take(request: web.Request) -> web.StreamResponse:
        request._client_max_size = app_limit
        bodies.append(await request.json())
        return web.json_response({"error": {"message": "seen"}}, status=400)

    target = open_target(TargetSpec(await serve({"POST /v1/completions": take}) + "/v1", "completions", model="m"))
    prepared = target.prepare(PlannedRequest(0, None, "word " * 300_000, 9))
    assert len(prepared.body) > 1 << 20
    with pytest.raises(RequestFailedError, match="HTTP 400: seen"):
        await target.send(prepared, Tally())
    assert bodies == [json.loads(prepared.body)]
    await target.close()


async def test_targets_and_the_ticket_of_a_retry_are_headers(serve: Serve) -> None:
    seen = []

    async def answer(request: web.Request) -> web.StreamResponse:
        seen.append({name: value for name, value in request.headers.items() if name.lower().startswith("x-")})
        return await streams(*ANSWER)(request)

    url = await serve({"GET /v1/models": ONE_MODEL, "POST /v1/completions": answer})
    target = open_target(TargetSpec(url + "/v1", "completions", prompt_mode="text"))
    try:
        for targets, ticket in (
            (RequestTargets(service_class="quick"), "t"),
            (RequestTargets(ttft_s=0.5, inter_token_s=0.03), ""),
            (None, ""),
        ):
            await target.send(target.prepare(PlannedRequest(0, None, "x", 4, targets)), Tally(), ticket)
    finally:
        await target.close()
    assert seen == [
        {"x-gateway-inference-objective": "quick", "x-chairlift-retry-ticket": "t"},
        {"x-slo-ttft-ms": "500", "x-slo-tpot-ms": "30"},
        {},
    ]


@pytest.mark.parametrize(
    ("retry_after_s", "ticket", "seconds"), [(1.25, "t", 1.25), (None, "", None)], ids=["booked", "without a slot"]
)
async def test_a_refusal_for_targets_says_when_to_come_back(
    retry_after_s: float | None, ticket: str, seconds: float | None, serve: Serve
) -> None:
    async def refuse(request: web.Request) -> web.StreamResponse:
        status, body, headers = error_object(
            TargetsInfeasible("late", retry_after_s=retry_after_s, retry_ticket=ticket)
        )
        return web.json_response(body, status=status, headers=headers)

    target = open_target(TargetSpec(await serve({"POST /v1/completions": refuse}) + "/v1", "completions"))
    try:
        with pytest.raises(RequestRefusedError, match="HTTP 429: late") as refused:
            await target.send(target.prepare(PlannedRequest(0, None, "x", 4)), Tally())
    finally:
        await target.close()
    assert (refused.value.retry_after_s, refused.value.retry_ticket) == (seconds, ticket)


@pytest.mark.parametrize("code", ["queue_full", None])
async def test_other_429s_are_errors(code: str | None, serve: Serve) -> None:
    url = await serve({"POST /v1/completions": answers({"error": {"message": "full", "code": code}}, 429)})
    target = open_target(TargetSpec(url + "/v1", "completions"))
    try:
        with pytest.raises(RequestFailedError, match="full") as failed:
            await target.send(target.prepare(PlannedRequest(0, None, "x", 4)), Tally())
    finally:
        await target.close()
    assert not isinstance(failed.value, RequestRefusedError)
