"""The OpenAPI document: valid for an independent validator, and equal to the routes and body models."""

import json

import aiohttp
import jsonschema
import openapi_spec_validator
import pytest

from frontend.access.api_keys import Access, load_keys
from frontend.api.http.app import make_app
from tests.support.frontend.http_apis import http_apis

STORED = {
    ("/v1/responses/{response_id}", "delete"),
    ("/v1/responses/{response_id}", "get"),
    ("/v1/responses/{response_id}/cancel", "post"),
    ("/v1/responses/{response_id}/input_items", "get"),
}
"""Served to be refused by name."""


async def document_of(keys=()):
    app = make_app(http_apis(), Access(load_keys(keys, None)))
    (route,) = [route for route in app.routes if route.path == "/openapi.json"]
    return json.loads((await route.endpoint(None)).body), app.routes


@pytest.fixture
async def document():
    return (await document_of())[0]


@pytest.mark.parametrize("keys", [(), ("secret",)])
async def test_document_is_valid_openapi(keys):
    document, _ = await document_of(keys)
    openapi_spec_validator.validate(document)
    assert document["openapi"] == "3.1.0"


async def test_every_route_is_described_and_nothing_else():
    document, routes = await document_of()
    served = {(route.path.replace(":path", ""), method.lower()) for route in routes for method in route.methods}
    described = {(path, method) for path, operations in document["paths"].items() for method in operations}
    assert served - described == {(path, "head") for path, method in served if method == "get"} | {
        ("/v1/models/", "get"),
        *STORED,
    }
    assert described <= served


async def test_bodies_are_described_by_the_models_that_check_them(document):
    completion = document["paths"]["/v1/completions"]["post"]
    assert set(completion["responses"]["200"]["content"]) == {"application/json", "text/event-stream"}
    reference = completion["requestBody"]["content"]["application/json"]["schema"]
    schema = {**reference, "components": document["components"]}
    jsonschema.validate({"prompt": "abc", "max_tokens": 3, "logit_bias": {"5": 1.5}, "stop": ["x"]}, schema)
    for bad in ({}, {"prompt": 1}, {"prompt": "abc", "max_tokens": -1}):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(bad, schema)


async def test_a_key_is_part_of_the_description_where_one_is_needed():
    document, _ = await document_of(("secret",))
    operations = {path: next(iter(each.values())) for path, each in document["paths"].items()}
    assert {path for path, operation in operations.items() if "security" not in operation} == {"/health", "/ping"}
    assert not any("security" in each for path in (await document_of())[0]["paths"].values() for each in path.values())


async def test_document_is_served_as_json(make_pair, document):
    pair = await make_pair(http=True, allow_runtime_lora_updating=True)
    async with (
        aiohttp.ClientSession(f"http://127.0.0.1:{pair.app.http_port}") as session,
        session.get("/openapi.json") as response,
    ):
        assert (response.status, response.content_type) == (200, "application/json")
        assert await response.json() == document


async def test_error_schemas_are_those_of_their_api(document):
    forms = {
        path: operation["responses"]["default"]["content"]["application/json"]["schema"]["$ref"].rpartition("/")[2]
        for path, operations in document["paths"].items()
        for operation in operations.values()
    }
    assert {path for path, form in forms.items() if form == "AnthropicError"} == {
        "/v1/messages",
        "/v1/messages/count_tokens",
    }
    assert forms["/v1/responses"] == "Error"
