"""What gateways ask beside answers: health, the model, the load, the tokenizer and the prefix cache."""

import asyncio
import hashlib
import io
import json
import zipfile
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1.health_pb2_grpc import HealthStub
from smg_grpc_proto import vllm_engine_pb2 as vllm_pb
from smg_grpc_proto.generated import common_pb2

from engine.core.outputs import SchedulerStats
from engine.demo import MODEL_DIR
from engine.interfaces import LoopSnapshot
from engine.model.tokenizer_files import TokenizerFiles
from engine.serving.listener import Listener
from engine.serving.parts import CheckpointInfo
from engine.serving.vllm.description import LoadMeter, model_info, tokenizer_archive, tokenizer_chunks
from engine.serving.vllm.service import SERVICE_NAME, serve_vllm
from tests.hang import HANG_S
from tests.support.engine.fake_engine import fake_engine_parts
from tests.support.engine.gateway import Gateway, wanted

PROMPT = tuple(range(10, 40))


@pytest.fixture
async def loading() -> AsyncIterator[Gateway]:
    """An engine that still loads."""
    service, add_services = serve_vllm(0.0)
    listener = Listener(service, "127.0.0.1:0", add_services=add_services)
    await listener.start()
    service.set_loading("loading weights 43 %")
    async with grpc.aio.insecure_channel(listener.address) as channel:
        yield Gateway(channel)
    await listener.stop(0)


async def status_of(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asyncio.wait_for(call, HANG_S)
    return caught.value


async def test_an_engine_that_loads_says_so_everywhere(loading: Gateway) -> None:
    health = await loading.stub.HealthCheck(vllm_pb.HealthCheckRequest())
    assert (health.healthy, health.message) == (False, "loading weights 43 %")
    for call in (
        loading.generate(wanted()),
        loading.stub.GetModelInfo(vllm_pb.GetModelInfoRequest()),
        loading.stub.GetServerInfo(vllm_pb.GetServerInfoRequest()),
        loading.stub.GetLoads(vllm_pb.GetLoadsRequest()),
        loading.stub.GetTokenizer(common_pb2.GetTokenizerRequest()).read(),
        loading.stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest()).read(),
    ):
        error = await status_of(call)
        assert (error.code(), error.details()) == (grpc.StatusCode.UNAVAILABLE, "loading weights 43 %")


async def test_health_is_served_under_both_names(served: Any) -> None:
    stub = HealthStub(served.gateway.channel)
    for name in ("", SERVICE_NAME, "chairlift.engine.v1.EngineService"):
        answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    assert (await served.gateway.stub.HealthCheck(vllm_pb.HealthCheckRequest())).healthy


async def test_other_methods_are_unimplemented_with_a_reason(served: Any) -> None:
    stub = served.gateway.stub
    for call in (
        stub.Embed(vllm_pb.EmbedRequest()),
        stub.FlushCache(common_pb2.FlushCacheRequest()),
        stub.StartProfile(common_pb2.StartProfileRequest()),
        stub.StopProfile(common_pb2.StopProfileRequest()),
    ):
        error = await status_of(call)
        assert error.code() is grpc.StatusCode.UNIMPLEMENTED
        assert ": " in error.details()


async def test_bytes_that_are_no_message_are_invalid(served: Any) -> None:
    method = served.gateway.channel.unary_stream(f"/{SERVICE_NAME}/Generate")
    error = await status_of(method(b"\xff\xff").read())
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_the_model_is_described(served: Any) -> None:
    info = await served.gateway.stub.GetModelInfo(vllm_pb.GetModelInfoRequest())
    assert (info.served_model_name, info.is_generation, info.supports_vision) == ("fake", True, False)
    assert (info.max_context_length, info.max_req_input_len, info.vocab_size) == (256, 255, 3072)
    assert list(info.eos_token_ids) == [1]
    assert json.loads(info.default_sampling_params_json) == {"temperature": 0.8, "top_p": 0.9}
    server = await served.gateway.stub.GetServerInfo(vllm_pb.GetServerInfoRequest())
    assert (server.block_size, server.max_num_seqs, server.data_parallel_size) == (4, 16, 1)


def test_what_the_checkpoint_says_is_passed_on() -> None:
    parts = fake_engine_parts()
    checkpoint = CheckpointInfo("/model", "llama", ("LlamaForCausalLM",), 5, 6)
    info = model_info(replace(parts, tokenizer=TokenizerFiles(()), checkpoint=checkpoint))
    assert (info.model_path, info.model_type, list(info.architectures)) == ("/model", "llama", ["LlamaForCausalLM"])
    assert (info.bos_token_id, info.pad_token_id, info.default_sampling_params_json) == (5, 6, "")


async def test_the_tokenizer_comes_as_an_archive(served: Any) -> None:
    files = TokenizerFiles.from_dir(MODEL_DIR)
    chunks = [chunk async for chunk in served.gateway.stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
    data = b"".join(chunk.data for chunk in chunks)
    assert [chunk.sha256 for chunk in chunks] == [*[""] * (len(chunks) - 1), hashlib.sha256(data).hexdigest()]
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        assert {name: archive.read(name) for name in archive.namelist()} == dict(files.files)
    assert data == tokenizer_archive(files)  # the digest names the files


def test_a_large_archive_comes_in_chunks() -> None:
    data = bytes(range(256)) * 10_000
    chunks = list(tokenizer_chunks(data))
    assert [len(chunk.data) for chunk in chunks] == [1 << 20, 1 << 20, len(data) - (2 << 20)]
    assert b"".join(chunk.data for chunk in chunks) == data


def test_the_load_is_converted_and_its_rate_measured() -> None:
    stats = SchedulerStats(3, 2, 70, 25, 100, 0, 0, 200, 50, 1000)
    info, meter = fake_engine_parts().info, LoadMeter()
    (load,) = meter.loads(info, LoopSnapshot(1, 1, stats), 10.0).loads
    assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (3, 2, 5)
    assert (load.num_used_tokens, load.max_total_num_tokens, load.token_usage) == (300, 400, 0.75)
    assert (load.cache_hit_rate, load.utilization, load.num_waiting_uncached_tokens) == (0.25, 3 / 16, 70)
    assert load.gen_throughput == 0.0
    for now_s, total, rate in ((12.0, 1100, 50.0), (12.5, 1150, 60.0), (13.0, 1200, 100.0), (14.0, 1210, 10.0)):
        snapshot = LoopSnapshot(1, 1, replace(stats, num_generated_tokens_total=total))
        assert meter.loads(info, snapshot, now_s).loads[0].gen_throughput == pytest.approx(rate), now_s


async def test_subscribers_follow_the_prefix_cache(served: Any) -> None:
    batches = served.gateway.stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
    snapshot = await asyncio.wait_for(batches.read(), HANG_S)
    assert (snapshot.snapshot.count, snapshot.snapshot.blocks) == (1, 0)
    (response,) = await served.gateway.generate(wanted(PROMPT, stream=False))
    token_ids = [*PROMPT, *response.complete.output_ids]
    num_full = (len(token_ids) - 1) // 4  # the last token is not computed
    blocks: list[Any] = []
    sequence = snapshot.sequence_number
    while len(blocks) < num_full:
        batch = await asyncio.wait_for(batches.read(), HANG_S)
        assert batch.sequence_number == (sequence := sequence + 1)
        for event in batch.events:
            assert event.stored.HasField("parent_block_hash") == bool(blocks)
            if blocks:
                assert event.stored.parent_block_hash == blocks[-1].block_hash
            blocks += event.stored.blocks
    assert [list(block.token_ids) for block in blocks] == [token_ids[4 * n : 4 * n + 4] for n in range(num_full)]
    late = served.gateway.stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
    snapshot = await asyncio.wait_for(late.read(), HANG_S)
    assert {event.stored.blocks[0].block_hash for event in snapshot.events[1:]} == {
        block.block_hash for block in blocks
    }


async def test_a_cursor_of_another_start_is_out_of_range(served: Any) -> None:
    call = served.gateway.stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(start_sequence_number=7))
    error = await status_of(call.read())
    assert error.code() is grpc.StatusCode.OUT_OF_RANGE


async def test_subscriptions_end_with_the_engine(served: Any) -> None:
    batches = served.gateway.stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest())
    await asyncio.wait_for(batches.read(), HANG_S)
    served.server.engine.drain(0.0)
    assert await asyncio.wait_for(batches.read(), HANG_S) is grpc.aio.EOF
    assert await batches.code() is grpc.StatusCode.OK
