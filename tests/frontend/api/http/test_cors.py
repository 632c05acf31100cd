"""CORS headers for pages of other origins."""

import contextlib

import aiohttp
import pytest

ORIGIN = "https://app.example"
PREFLIGHT = {
    "Origin": ORIGIN,
    "Access-Control-Request-Method": "POST",
    "Access-Control-Request-Headers": "authorization, content-type, x-stainless-lang",
}


@pytest.fixture
async def connect_to(make_pair):
    sessions = []

    async def connect_to(**config):
        pair = await make_pair(http=True, **config)
        sessions.append(aiohttp.ClientSession(f"http://127.0.0.1:{pair.app.http_port}"))
        return sessions[-1]

    yield connect_to
    for session in sessions:
        await session.close()


async def test_no_origin_is_allowed_by_default(connect_to):
    session = await connect_to()
    async with session.options("/v1/completions", headers=PREFLIGHT) as response:
        assert response.status == 405
        assert not [name for name in response.headers if name.lower().startswith("access-control-")]
    async with session.get("/v1/models", headers={"Origin": ORIGIN}) as response:
        assert response.status == 200
        assert not [name for name in response.headers if name.lower().startswith("access-control-")]


async def test_preflight_of_an_allowed_origin_needs_no_key(connect_to):
    session = await connect_to(allowed_origins=(ORIGIN, "http://other.example:3000"), api_key=("secret",))
    async with session.options("/v1/chat/completions", headers=PREFLIGHT) as response:
        assert response.status == 200
        assert response.headers["Access-Control-Allow-Origin"] == ORIGIN
        assert "POST" in response.headers["Access-Control-Allow-Methods"]
        allowed = {name.strip() for name in response.headers["Access-Control-Allow-Headers"].lower().split(",")}
        assert {"authorization", "content-type", "x-stainless-lang"} <= allowed
        assert "Access-Control-Allow-Credentials" not in response.headers


async def test_the_answer_and_its_errors_may_be_read_by_an_allowed_origin(connect_to):
    session = await connect_to(allowed_origins=(ORIGIN,), api_key=("secret",))
    body = {"prompt": "abc", "stream": True}
    for key, status in (("secret", 200), ("wrong", 401)):
        headers = {"Origin": ORIGIN, "Authorization": f"Bearer {key}"}
        async with session.post("/v1/completions", headers=headers, json=body) as response:
            assert response.status == status
            assert response.headers["Access-Control-Allow-Origin"] == ORIGIN
            exposed = set(response.headers["Access-Control-Expose-Headers"].split(", "))
            assert {"x-request-id", "x-chairlift-ignored-parameters"} <= exposed
            assert {"retry-after", "x-chairlift-retry-ms", "x-chairlift-retry-ticket"} <= exposed  # of refusals
            await response.read()


async def test_another_origin_gets_no_cors_headers(connect_to):
    session = await connect_to(allowed_origins=(ORIGIN,))
    for origin in ("https://app.example.org", "http://app.example", "null", ORIGIN + ":8443"):
        async with session.options("/v1/completions", headers={**PREFLIGHT, "Origin": origin}) as response:
            assert response.status == 400
            assert "Access-Control-Allow-Origin" not in response.headers
        async with session.get("/v1/models", headers={"Origin": origin}) as response:
            assert "Access-Control-Allow-Origin" not in response.headers


async def test_a_star_allows_all(connect_to):
    session = await connect_to(allowed_origins=("*",))
    async with session.options("/v1/completions", headers=PREFLIGHT) as response:
        assert (response.status, response.headers["Access-Control-Allow-Origin"]) == (200, "*")


@pytest.mark.parametrize(
    "headers",
    [
        {"Origin": ORIGIN},
        {"Origin": "null"},
        {"Origin": "http://127.0.0.1:1"},
        {"Sec-Fetch-Site": "cross-site"},
        {"Sec-Fetch-Site": "same-site"},
        {"Sec-Fetch-Site": "cross-site", "Origin": "http://{host}"},
    ],
)
async def test_a_page_of_another_origin_needs_a_content_type(shared_pair, headers):
    for path in ("/v1/completions", "/tokenize"):
        async with bytes_posted(shared_pair, path, headers) as response:
            assert response.status == 415
            assert "content-type: application/json" in await response.text()
    assert not shared_pair.engine.submissions


async def test_a_page_of_an_allowed_origin_needs_a_content_type_too_and_can_read_the_error(make_pair):
    pair = await make_pair(http=True, allowed_origins=(ORIGIN,))
    async with bytes_posted(pair, "/v1/completions", {"Origin": ORIGIN}) as response:
        assert response.status == 415
        assert response.headers["Access-Control-Allow-Origin"] == ORIGIN


@pytest.mark.parametrize(
    "headers",
    [{}, {"Origin": "http://{host}"}, {"Sec-Fetch-Site": "same-origin", "Origin": ORIGIN}, {"Sec-Fetch-Site": "none"}],
)
async def test_others_need_no_content_type(shared_pair, headers):
    async with bytes_posted(shared_pair, "/v1/completions", headers) as response:
        assert response.status == 200


@contextlib.asynccontextmanager
async def bytes_posted(pair, path, headers):
    """POSTs a prompt as fetch() sends an array of bytes: without Content-Type."""
    host = f"127.0.0.1:{pair.app.http_port}"
    headers = {name: value.format(host=host) for name, value in headers.items()}
    async with (
        aiohttp.ClientSession(f"http://{host}", skip_auto_headers=("Content-Type",)) as session,
        session.post(path, headers=headers, data=b'{"prompt": "abc"}') as response,
    ):
        yield response
