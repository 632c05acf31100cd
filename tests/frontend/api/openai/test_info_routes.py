"""The endpoints that do not generate."""

import asyncio
import json
from importlib.metadata import version

import aiohttp
import openai
import pytest

from chairlift.engine.v1 import engine_service_pb2 as engine_pb
from tests.support.frontend.fake_engine import FakeEngine


async def fetch(pair, path, body=None):
    """Status, content type and body of one request."""
    url, method = f"http://127.0.0.1:{pair.app.http_port}{path}", "GET" if body is None else "POST"
    async with aiohttp.ClientSession() as session, session.request(method, url, json=body) as response:
        return response.status, response.headers.get("content-type"), await response.read()


async def fetch_json(pair, path, body=None):
    status, _, content = await fetch(pair, path, body)
    return status, json.loads(content)


async def test_models_are_listed_and_found(shared_client):
    (model,) = (await shared_client.models.list()).data
    assert (model.id, model.object, model.owned_by, model.max_model_len) == ("fake", "model", "chairlift", 4096)
    assert model.meta == {"n_vocab": 258}
    assert (await shared_client.models.retrieve("fake")) == model
    with pytest.raises(openai.NotFoundError) as caught:
        await shared_client.models.retrieve("org/other")
    assert caught.value.code == "model_not_found"


async def test_health_follows_the_engine(http_pair):
    assert (await fetch(http_pair, "/health"))[0] == 200
    http_pair.engine.set_state(engine_pb.ENGINE_STATE_DRAINING)
    while http_pair.app.engines.serving:
        await asyncio.sleep(0)
    assert (await fetch(http_pair, "/health"))[0] == 503


async def test_ping_succeeds_while_draining(http_pair):
    http_pair.engine.set_state(engine_pb.ENGINE_STATE_DRAINING)
    while http_pair.app.engines.serving:
        await asyncio.sleep(0)
    assert (await fetch(http_pair, "/ping"))[0] == 200
    assert (await fetch(http_pair, "/ping", {}))[0] == 200


async def test_models_with_a_trailing_slash_are_the_same_list(shared_pair):
    assert await fetch(shared_pair, "/v1/models/") == await fetch(shared_pair, "/v1/models")


async def test_version_is_the_packages(shared_pair):
    assert await fetch_json(shared_pair, "/version") == (200, {"version": version("chairlift")})


async def test_metrics_count_http_requests(http_pair, client):
    await client.completions.create(model="fake", prompt="abc")
    status, content_type, text = await fetch(http_pair, "/metrics")
    assert (status, content_type.partition(";")[0]) == (200, "text/plain")
    (line,) = [line for line in text.decode().splitlines() if line.startswith("chairlift:prompt_tokens_total{")]
    assert float(line.rpartition(" ")[2]) == 3


async def test_tokenize_and_detokenize_are_each_others_inverse(shared_pair):
    status, answer = await fetch_json(shared_pair, "/tokenize", {"prompt": "héllo", "return_token_strs": True})
    assert (status, answer["count"], answer["max_model_len"]) == (200, 6, 4096)
    assert "".join(answer["token_strs"][:1]) == "h"
    assert await fetch_json(shared_pair, "/detokenize", {"tokens": answer["tokens"]}) == (200, {"prompt": "héllo"})


async def test_detokenize_shows_special_tokens(shared_pair):
    assert await fetch_json(shared_pair, "/detokenize", {"tokens": [256]}) == (200, {"prompt": "<|end|>"})


async def test_tokenize_takes_a_conversation(shared_pair):
    messages = [{"role": "user", "content": "hi"}]
    opened = await fetch_json(shared_pair, "/tokenize", {"messages": messages})
    assert opened[1]["count"] == len("<user>hi<assistant>")
    answered = await fetch_json(shared_pair, "/detokenize", {"tokens": opened[1]["tokens"]})
    assert answered[1]["prompt"] == "<user>hi<assistant>"


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": []}, "prompt"),
        ("/tokenize", {"prompt": "x" * 40_000}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "a", "model": "other"}, "model"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
        ("/detokenize", {"tokens": [258]}, "tokens"),
        ("/detokenize", {"tokens": [1] * 4097}, "tokens"),
    ],
)
async def test_bad_parameter_is_named(shared_pair, path, body, param):
    status, answer = await fetch_json(shared_pair, path, body)
    assert (status, answer["error"]["param"]) == (404 if param == "model" else 400, param)
    await shared_pair.idle()


async def test_each_name_of_the_model_is_listed_and_served_and_answers_have_the_first(make_pair, connect):
    engine = FakeEngine(aliases=["org/other", "third"], adapters={"tuned": "path"})
    pair = await make_pair(engine=engine, http=True)
    client = connect(pair)
    listed = {model.id: (model.root, model.parent) for model in (await client.models.list()).data}
    assert list(listed) == ["fake", "org/other", "third", "tuned"]
    assert listed == dict.fromkeys(["fake", "org/other", "third"], ("fake", None)) | {"tuned": ("tuned", "fake")}
    assert (await client.models.retrieve("org/other")).id == "org/other"
    for name in ("fake", "org/other", "third"):
        assert (await client.completions.create(model=name, prompt="abc", max_tokens=2)).model == "fake"
    stream = await client.completions.create(model="third", prompt="abc", max_tokens=2, stream=True)
    assert {chunk.model async for chunk in stream} == {"fake"}
    assert (await client.completions.create(model="tuned", prompt="abc", max_tokens=2)).model == "tuned"
    assert [one.adapter for one in engine.submissions] == [""] * 4 + ["tuned"]
    with pytest.raises(openai.NotFoundError, match="'fake' and 'org/other' and 'third' and 'tuned' are"):
        await client.completions.create(model="fourth", prompt="abc")
    _, _, metrics = await fetch(pair, "/metrics")
    assert b'model_name="fake"' in metrics
    assert b"third" not in metrics
