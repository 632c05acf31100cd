"""Adapters over HTTP: vLLM's bodies, answers and statuses, and who may call."""

import aiohttp
import grpc
import pytest

from chairlift.v1 import generation_service_pb2 as pb
from frontend.config import FrontendConfig
from frontend.errors import ConfigError
from tests.hang import HANG_S

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


@pytest.fixture
async def make_caller(make_pair):
    """make_caller(**config) -> call(path, body, key=None) -> status, text, of a pair that allows changes."""
    sessions = []

    async def make(**config):
        pair = await make_pair(http=True, **({"allow_runtime_lora_updating": True} | config))
        session = aiohttp.ClientSession(f"http://127.0.0.1:{pair.app.http_port}")
        sessions.append(session)

        async def call(path, body, key=None, method="POST"):
            headers = {} if key is None else {"Authorization": f"Bearer {key}"}
            async with session.request(method, path, json=body, headers=headers) as response:
                return response.status, await response.text()

        call.pair = pair
        return call

    yield make
    for session in sessions:
        await session.close()


async def test_an_adapter_is_listed_from_its_load_to_its_unload(make_caller):
    call = await make_caller()
    assert await call(LOAD, {"lora_name": "sql", "lora_path": "sql-lora"}) == (
        200,
        "Success: LoRA adapter 'sql' added successfully.",
    )
    status, models = await call("/v1/models", None, method="GET")
    assert (status, '"id":"sql"' in models, '"parent":"fake"' in models) == (200, True, True)
    assert (await call("/v1/completions", {"model": "sql", "prompt": "abc", "max_tokens": 1}))[0] == 200
    assert await call(UNLOAD, {"lora_name": "sql"}) == (200, "Success: LoRA adapter 'sql' removed successfully.")
    status, text = await call("/v1/completions", {"model": "sql", "prompt": "abc"})
    assert (status, "model_not_found" in text) == (404, True)
    status, text = await call(UNLOAD, {"lora_name": "sql"})
    assert (status, "lora_name 'sql' cannot be found" in text) == (404, True)


async def test_a_loaded_name_needs_load_inplace(make_caller):
    call = await make_caller()
    body = {"lora_name": "sql", "lora_path": "one"}
    assert (await call(LOAD, body))[0] == 200
    assert (await call(LOAD, body))[0] == 400
    assert (await call(LOAD, body | {"lora_path": "two", "load_inplace": True}))[0] == 200
    assert {name: one.path for name, one in call.pair.engine.adapters.items()} == {"sql": "two"}


@pytest.mark.parametrize("body", [{}, {"lora_name": "a"}, {"lora_path": "b"}, {"lora_name": "", "lora_path": ""}])
async def test_names_and_paths_must_be_given(make_caller, body):
    call = await make_caller()
    status, text = await call(LOAD, body)
    assert (status, "lora_name and lora_path must be given" in text) == (400, True)


async def test_the_paths_do_not_exist_unless_a_flag_allows_changes(make_caller):
    call = await make_caller(allow_runtime_lora_updating=False)
    for path in (LOAD, UNLOAD):
        assert (await call(path, {"lora_name": "a", "lora_path": "b"}))[0] == 404


async def test_keys_for_administration_open_all_and_others_change_nothing(make_caller):
    call = await make_caller(api_key=("client",), admin_api_key=("admin",))
    body = {"lora_name": "a", "lora_path": "b"}
    for key in (None, "client", "wrong"):
        for path in (LOAD, UNLOAD):
            assert (await call(path, body, key))[0] == 401
    assert (await call(LOAD, body, "admin"))[0] == 200
    for key in ("client", "admin"):
        assert (await call("/v1/models", None, key, method="GET"))[0] == 200
    stub = call.pair.stub()
    request = pb.UnloadAdapterRequest(name="a")
    for metadata in ((), (("authorization", "Bearer client"),)):
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await stub.UnloadAdapter(request, metadata=metadata, timeout=HANG_S)
        assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
    await stub.UnloadAdapter(request, metadata=(("authorization", "Bearer admin"),), timeout=HANG_S)
    assert not call.pair.engine.adapters


async def test_without_keys_for_clients_only_changes_need_a_key(make_caller):
    call = await make_caller(admin_api_key=("admin",))
    body = {"lora_name": "a", "lora_path": "b"}
    assert (await call(LOAD, body))[0] == 401
    assert (await call("/v1/models", None, method="GET"))[0] == 200
    assert (await call(LOAD, body, "admin"))[0] == 200


async def test_without_keys_for_administration_those_of_clients_change_adapters(make_caller):
    call = await make_caller(api_key=("client",))
    body = {"lora_name": "a", "lora_path": "b"}
    assert (await call(LOAD, body))[0] == 401
    assert (await call(LOAD, body, "client"))[0] == 200


@pytest.mark.parametrize("open_host", [{"host": "0.0.0.0"}, {"http_host": "0.0.0.0"}])
def test_other_machines_need_a_key_for_administration(open_host):
    with pytest.raises(ConfigError, match="needs --admin-api-key or"):
        FrontendConfig(insecure_bind=True, allow_runtime_lora_updating=True, api_key=("client",), **open_host)
    FrontendConfig(insecure_bind=True, allow_runtime_lora_updating=True, admin_api_key=("admin",), **open_host)
    FrontendConfig(allow_runtime_lora_updating=True)
