"""API keys over HTTP, for every route of the application."""

import logging

import aiohttp
import openai
import pytest

from frontend.access.api_keys import Access
from frontend.api.http.app import make_app
from tests.support.frontend.http_apis import http_apis

KEY = "the-key-of-this-test"
BAD = {
    "none": {},
    "wrong": {"Authorization": "Bearer wrong"},
    "empty": {"Authorization": ""},
    "empty key": {"Authorization": "Bearer "},
    "10 KB": {"Authorization": "Bearer " + "k" * 10_000},
    "elsewhere": {"Api-Key": KEY},
    "wrong bare key": {"X-Api-Key": "wrong"},
    "bare key with a scheme": {"X-Api-Key": f"Bearer {KEY}"},
}
ROUTES = [
    (method, route.path.replace("{model:path}", "fake"))
    for route in make_app(http_apis(), Access(())).routes
    for method in route.methods
]
UNKNOWN = [
    ("GET", "/nothing"),
    ("GET", "/health/"),
    ("GET", "/HEALTH"),
    ("GET", "/v1/../metrics"),
    ("PUT", "/metrics"),
]


@pytest.fixture
async def keyed_pair(make_pair):
    return await make_pair(http=True, api_key=("other", KEY))


@pytest.fixture
async def session(keyed_pair):
    async with aiohttp.ClientSession(f"http://127.0.0.1:{keyed_pair.app.http_port}") as session:
        yield session


@pytest.mark.parametrize("bad", BAD)
async def test_every_route_refuses_a_request_without_a_key_except_health_and_ping(session, caplog, bad):
    caplog.set_level(logging.DEBUG)
    assert len(ROUTES) >= 9
    for method, path in ROUTES + UNKNOWN:
        async with session.request(method, path, headers=BAD[bad], data=b"{}") as response:
            if path in ("/health", "/ping"):
                assert response.status == 200
                continue
            assert (method, path, response.status) == (method, path, 401)
            assert response.headers["www-authenticate"] == "Bearer"
            if method != "HEAD":
                error = (await response.json())["error"]
                if path.startswith("/v1/messages"):
                    assert error["type"] == "authentication_error"
                else:
                    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
                assert "authorization: Bearer KEY" in error["message"]
    assert KEY not in caplog.text


async def test_with_a_key_every_route_answers(session):
    for method, path in ROUTES:
        async with session.request(method, path, headers={"Authorization": f"Bearer {KEY}"}, data=b"{}") as response:
            assert (path, response.status) != (path, 401)


GOOD = {
    "bare key": {"X-Api-Key": KEY},
    "bare key beside another authorization": {"X-Api-Key": KEY, "Authorization": "Bearer of-a-gateway"},
}


@pytest.mark.parametrize("good", GOOD)
async def test_key_may_come_as_x_api_key(session, good):
    async with session.get("/v1/models", headers=GOOD[good]) as response:
        assert response.status == 200


async def test_two_bare_keys_are_none(session):
    async with session.get("/v1/models", headers=[("X-Api-Key", KEY), ("X-Api-Key", KEY)]) as response:
        assert response.status == 401


async def test_openais_client_sends_its_key_and_raises_the_refusal(keyed_pair, connect):
    assert [model.id async for model in connect(keyed_pair, api_key=KEY).models.list()] == ["fake"]
    with pytest.raises(openai.AuthenticationError):
        await connect(keyed_pair, api_key="wrong").models.list()
