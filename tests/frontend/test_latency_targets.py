"""Latency targets from HTTP and gRPC to the engine; refusals with a slot, and clients that come back with tickets."""

import asyncio

import aiohttp
import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from chairlift.engine.v1 import engine_service_pb2 as engine_pb
from chairlift.v1 import generation_service_pb2 as pb
from frontend.app import FrontendApp
from frontend.config import FrontendConfig
from frontend.errors import ConfigError
from frontend.generation import retry_ticket
from tests.hang import HANG_S
from tests.support.frontend.byte_tokenizer import byte_tokenizer_files
from tests.support.frontend.fake_engine import FakeEngine

CLASSES = """
[classes.interactive]
ttft_ms = {ttft_ms}
inter_token_ms = 60000
weight = 2
pacing = "paced"
when_infeasible = "refuse"
[classes.patient]
ttft_ms = 500
[classes.batch]
"""
SPEC = pb.GenerationSpec(text="x" * 40)
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
TICKET = "x-chairlift-retry-ticket"


TTFT_S = 500
"""Target of the tests with tickets: the tenth of it that only a ticket may use is more than a machine ever stalls."""


@pytest.fixture
def make(make_pair, tmp_path, monkeypatch):
    """make(...) -> a pair with classes and HTTP; `backlog(pair, tokens)` sets what the engine says of its queue."""
    monkeypatch.setattr(retry_ticket, "LATE_S", HANG_S)

    async def make_with_classes(*, ttft_s=5, **config):
        path = tmp_path / "classes.toml"
        path.write_text(CLASSES.format(ttft_ms=1000 * ttft_s))
        return await make_pair(
            engine=FakeEngine(heartbeat_s=0.01, files=byte_tokenizer_files(TEMPLATE)),
            **{"http": True, "service_classes": path, "heartbeat_timeout_s": 600.0, **config},
        )

    return make_with_classes


async def backlog(pair, num_tokens, *, rate=1000.0, **load):
    """Lets the engine report prompt tokens that wait, and waits until the frontend knows."""
    pair.engine.load = engine_pb.LoadStats(
        prompt_tokens_per_second=rate, lane_tokens=[num_tokens, 0], step_us=1000, **load
    )
    while [each[:2] for each in pair.app.engines.forecast(0.0).engines] != [(rate, num_tokens)]:
        await asyncio.sleep(0)


def spec_of(service_class="interactive", **targets):
    spec = pb.GenerationSpec(text="x" * 40)
    spec.latency_targets.CopyFrom(pb.LatencyTargets(service_class=service_class, **targets))
    return spec


async def refused(call):
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    return caught.value


def retry_info(error):
    class Finished:
        code, details, trailing_metadata = error.code, error.details, error.trailing_metadata

    for detail in rpc_status.from_call(Finished).details:
        info = error_details_pb2.RetryInfo()
        if detail.Unpack(info):
            return info.retry_delay.ToTimedelta().total_seconds()
    return None


async def post(pair, path, body, **headers):
    async with (
        aiohttp.ClientSession() as session,
        session.post(f"http://127.0.0.1:{pair.app.http_port}{path}", json=body, headers=headers) as response,
    ):
        return response.status, response.headers, await response.json()


MESSAGES = [{"role": "user", "content": "x" * 40}]
COMPLETION = {"prompt": "x" * 40, "max_tokens": 4}
BODIES = {
    "/v1/completions": COMPLETION,
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/responses": {"input": "x" * 40, "max_output_tokens": 4},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4, "model": ""},
}


async def test_without_classes_and_targets_nothing_is_sent(make_pair):
    pair = await make_pair(http=True)
    await pair.stub().Generate(pb.GenerateRequest(spec=SPEC))
    status, _, _ = await post(pair, "/v1/completions", COMPLETION | {"service_tier": "flex"})
    assert status == 200
    for submission in pair.engine.submissions:
        names = {field.name for field, _ in submission.ListFields()}
        assert not names & {
            *("ttft_remaining_ms", "inter_token_us", "tenant", "service_class", "value", "pacing", "when_infeasible")
        }


async def test_a_class_reaches_the_engine_over_grpc(make):
    pair = await make()
    await pair.stub().Generate(pb.GenerateRequest(spec=spec_of()))
    (submission,) = pair.engine.submissions
    assert 0 < submission.ttft_remaining_ms <= 5000
    assert submission.inter_token_us == 60_000_000
    assert (submission.service_class, submission.value) == ("interactive", 2.0)
    assert submission.pacing == engine_pb.PACING_PACED
    assert submission.when_infeasible == engine_pb.WHEN_INFEASIBLE_REFUSE


async def test_further_answers_are_not_refused_after_the_first_one_has_begun(make):
    pair = await make()
    spec = spec_of()
    spec.num_answers = 3
    response = await pair.stub().Generate(pb.GenerateRequest(spec=spec))
    assert len(response.other_answers) == 2
    first, *others = pair.engine.submissions
    assert first.when_infeasible == engine_pb.WHEN_INFEASIBLE_REFUSE
    assert {one.when_infeasible for one in others} == {engine_pb.WHEN_INFEASIBLE_WAIT}
    assert all(0 < one.ttft_remaining_ms <= first.ttft_remaining_ms for one in others)
    assert {(one.inter_token_us, one.service_class) for one in others} == {(60_000_000, "interactive")}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
async def test_a_service_tier_reaches_the_engine_over_http(make, path):
    pair = await make()
    status, _, _ = await post(pair, path, BODIES[path] | {"service_tier": "batch"})
    assert status == 200
    assert pair.engine.submissions[0].service_class == "batch"


async def test_headers_of_gateways_reach_the_engine(make):
    pair = await make(trust_gateway_headers=True)
    headers = {
        "x-slo-ttft-ms": "400",
        "x-slo-tpot-ms": "25",
        "x-gateway-inference-objective": "batch",
        "x-gateway-inference-fairness-id": "acme",
    }
    status, _, _ = await post(pair, "/v1/completions", COMPLETION, **headers)
    assert status == 200
    (submission,) = pair.engine.submissions
    assert 0 < submission.ttft_remaining_ms <= 400
    assert (submission.inter_token_us, submission.service_class, submission.tenant) == (25_000, "batch", "acme")


async def test_the_tenant_header_needs_trust(make):
    pair = await make()
    await post(pair, "/v1/completions", COMPLETION, **{"x-gateway-inference-fairness-id": "acme"})
    metadata = [("x-gateway-inference-fairness-id", "acme")]
    await pair.stub().Generate(pb.GenerateRequest(spec=SPEC), metadata=metadata)
    assert [submission.tenant for submission in pair.engine.submissions] == ["", ""]


async def test_a_trusted_tenant_over_grpc(make):
    pair = await make(trust_gateway_headers=True)
    metadata = [("x-gateway-inference-fairness-id", "acme")]
    await pair.stub().Generate(pb.GenerateRequest(spec=SPEC), metadata=metadata)
    assert pair.engine.submissions[0].tenant == "acme"
    error = await refused(pair.stub().Generate(pb.GenerateRequest(spec=SPEC), metadata=[*metadata, *metadata]))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == "x-gateway-inference-fairness-id is sent 2 times, at most once is allowed"


async def test_the_key_decides_tenant_and_class(make, tmp_path):
    path = tmp_path / "keys"
    path.write_text("secret class=patient,batch tenant=acme\n")
    pair = await make(api_key_file=path)
    metadata = [("authorization", "Bearer secret")]
    await pair.stub().Generate(pb.GenerateRequest(spec=SPEC), metadata=metadata)
    await post(pair, "/v1/completions", COMPLETION, authorization="Bearer secret")
    assert [(one.service_class, one.tenant) for one in pair.engine.submissions] == [("patient", "acme")] * 2
    status, _, answer = await post(
        pair, "/v1/completions", COMPLETION | {"service_tier": "interactive"}, authorization="Bearer secret"
    )
    assert status == 400
    assert answer["error"]["param"] == "service_tier"
    assert answer["error"]["message"] == "service_tier 'interactive' is not among those of the API key: patient, batch"


async def test_unknown_classes_name_the_known_ones(make):
    pair = await make()
    status, _, answer = await post(pair, "/v1/completions", COMPLETION | {"service_tier": "flex"})
    assert (status, answer["error"]["param"]) == (400, "service_tier")
    assert answer["error"]["message"] == ("service_tier 'flex' is unknown, this server has interactive, patient, batch")
    error = await refused(pair.stub().Generate(pb.GenerateRequest(spec=spec_of("flex"))))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    for tier in ("auto", "default", None):
        status, _, _ = await post(pair, "/v1/completions", COMPLETION | {"service_tier": tier})
        assert status == 200


async def test_contradicting_targets_name_both(make):
    pair = await make()
    spec = spec_of(inter_token=Duration(nanos=10**7), min_tokens_per_second=50)
    error = await refused(pair.stub().Generate(pb.GenerateRequest(spec=spec)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details().startswith("min_tokens_per_second is 50 and inter_token is 0.01 s: set one of them")


async def test_targets_that_no_step_can_meet_are_refused(make):
    pair = await make()
    await backlog(pair, 0, model_coefficients=[0.004, 0.001, 0.0, 0.0, 0.0])
    error = await refused(pair.stub().Generate(pb.GenerateRequest(spec=spec_of(inter_token=Duration(nanos=10**6)))))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details() == "inter_token is 0.001 s, a step of the engine takes at least 0.005 s"


@pytest.mark.parametrize(("step_s", "is_logged"), [(0.6, True), (0.4, False)])
async def test_classes_that_no_step_can_meet_are_logged_at_the_start(step_s, is_logged, make_pair, tmp_path, caplog):
    path = tmp_path / "classes.toml"
    path.write_text(CLASSES.format(ttft_ms=5000))
    engine = FakeEngine()
    engine.load = engine_pb.LoadStats(
        prompt_tokens_per_second=1000.0, lane_tokens=[0, 0], model_coefficients=[step_s, 0.0, 0.0, 0.0, 0.0]
    )
    await make_pair(engine=engine, service_classes=path)
    lines = [record.getMessage() for record in caplog.records if "--service-classes" in record.getMessage()]
    said = "--service-classes: patient has ttft_ms = 500, but a step with one request takes 600 ms"
    assert [line.startswith(said) for line in lines] == [True] * is_logged


async def test_classes_that_never_refuse_are_logged_at_the_start(make_pair, tmp_path, caplog):
    path = tmp_path / "classes.toml"
    path.write_text(CLASSES.format(ttft_ms=5000))
    await make_pair(engine=FakeEngine(), service_classes=path)  # without a step-time model, as under fcfs
    lines = [record.getMessage() for record in caplog.records if "--service-classes" in record.getMessage()]
    assert [line.partition(",")[0] for line in lines] == [
        "--service-classes: when_infeasible of interactive has no effect"
    ]
    assert lines[0].endswith("--scheduling-policy slo")


async def test_a_stall_before_an_engine_became_idle_refuses_nothing(make):
    pair = await make()
    pair.engine.load = engine_pb.LoadStats(prompt_tokens_per_second=1000.0, lane_tokens=[0, 0], step_us=10_000_000)
    while pair.app.engines.forecast(0.0).tokens_per_second != 1000.0:
        await asyncio.sleep(0)
    await pair.stub().Generate(pb.GenerateRequest(spec=spec_of()))
    assert len(pair.engine.submissions) == 1


async def test_grpc_refusal_and_retry_with_the_ticket(skip, make, scrape):
    pair = await make(ttft_s=TTFT_S)
    await backlog(pair, 1000 * (TTFT_S + 20))
    error = await refused(pair.stub().Generate(pb.GenerateRequest(spec=spec_of())))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error.details().startswith("the first token would come after about 520 s, the target of service class")
    assert not pair.engine.submissions
    metadata = dict(error.trailing_metadata())
    assert metadata["grpc-retry-pushback-ms"] == "-1"
    delay_s = retry_info(error)
    assert 19.5 < delay_s < 20.5
    skip(delay_s)
    await backlog(pair, 900 * TTFT_S)
    assert (await refused(pair.stub().Generate(pb.GenerateRequest(spec=spec_of())))).code() is (
        grpc.StatusCode.RESOURCE_EXHAUSTED
    )
    back = spec_of(retry_ticket=metadata[TICKET].encode())
    assert (await pair.stub().Generate(pb.GenerateRequest(spec=back))).text == "x" * 40
    again = await refused(pair.stub().Generate(pb.GenerateRequest(spec=back)))
    assert again.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert again.details() == "retry_ticket has been used: send the request without it"
    results = scrape(pair.app.metrics, "chairlift:retry_total", "result")
    assert (results["booked"], results["met"], results["invalid"]) == (2, 1, 1)
    outcomes = scrape(pair.app.metrics, "chairlift:goodput_requests_total", "service_class", "outcome")
    assert outcomes["interactive", "refused"] == 2
    assert outcomes["interactive", "met"] == 1


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages"])
async def test_http_refusal_and_retry_with_the_ticket(skip, make, path):
    pair, body = await make(ttft_s=TTFT_S), BODIES[path]
    await backlog(pair, 1000 * (TTFT_S + 20))
    headers = {"x-gateway-inference-objective": "interactive"}
    status, answered, answer = await post(pair, path, body, **headers)
    assert status == 429, answer
    retry_ms = int(answered["x-chairlift-retry-ms"])
    assert int(answered["retry-after"]) == -(-retry_ms // 1000)
    assert "first token would come after" in answer["error"]["message"]
    if path != "/v1/messages":
        assert answer["error"]["code"] == "targets_infeasible"
    skip(retry_ms / 1000)
    await backlog(pair, 900 * TTFT_S)
    assert (await post(pair, path, body, **headers))[0] == 429
    status, _, answer = await post(pair, path, body, **headers, **{TICKET: answered[TICKET]})
    assert status == 200, answer
    status, _, answer = await post(pair, path, body, **headers, **{TICKET: answered[TICKET]})
    assert status == 400
    assert "has been used: send the request without it" in answer["error"]["message"]


async def test_beyond_the_horizon_there_is_no_retry_time(make):
    pair = await make(retry_horizon_s=2.0)
    await backlog(pair, 100_000)
    error = await refused(pair.stub().Generate(pb.GenerateRequest(spec=spec_of())))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert retry_info(error) is None
    assert TICKET not in dict(error.trailing_metadata())
    status, headers, _ = await post(pair, "/v1/completions", COMPLETION | {"service_tier": "interactive"})
    assert status == 429
    assert not {"retry-after", "x-chairlift-retry-ms", TICKET} & set(map(str.lower, headers))


@pytest.mark.parametrize("service_class", ["patient", "batch", ""])
async def test_other_classes_are_not_refused(make, service_class):
    pair = await make()
    await backlog(pair, 100_000)
    await pair.stub().Generate(pb.GenerateRequest(spec=spec_of(service_class)))


async def test_a_call_with_several_prompts_is_refused_as_a_whole_and_has_one_ticket(skip, make):
    pair = await make(ttft_s=TTFT_S)
    await backlog(pair, 1000 * (TTFT_S + 20))
    body = {"prompt": ["x" * 10] * 3, "max_tokens": 4, "service_tier": "interactive"}
    status, headers, _ = await post(pair, "/v1/completions", body)
    assert status == 429
    skip(int(headers["x-chairlift-retry-ms"]) / 1000)
    await backlog(pair, 0)
    status, _, _ = await post(pair, "/v1/completions", body, **{TICKET: headers[TICKET]})
    assert status == 200
    assert len(pair.engine.submissions) == 3


async def test_each_prompt_of_a_refused_call_counts(make, scrape):
    pair = await make(max_queued_requests=3)
    body = {"prompt": ["x" * 10] * 3, "max_tokens": 4, "service_tier": "interactive"}
    assert (await post(pair, "/v1/completions", body))[0] == 200
    pair.engine.pause()
    waiting = pair.stub().Generate(pb.GenerateRequest(spec=SPEC))
    await pair.engine.wait_for(lambda: pair.engine.num_open == 1)
    _, _, full = await post(pair, "/v1/completions", body)
    pair.engine.resume()
    await waiting
    await backlog(pair, 20_000)
    _, _, late = await post(pair, "/v1/completions", body)
    assert [answer["error"]["code"] for answer in (full, late)] == ["queue_full", "targets_infeasible"]
    outcomes = scrape(pair.app.metrics, "chairlift:goodput_requests_total", "service_class", "outcome")
    assert (outcomes["interactive", "met"], outcomes["interactive", "refused"]) == (3, 6)


async def test_a_full_queue_does_not_use_up_a_ticket(skip, make):
    pair = await make(ttft_s=TTFT_S, max_queued_requests=3)
    await backlog(pair, 1000 * (TTFT_S + 20))
    body = {"prompt": ["x" * 10] * 3, "max_tokens": 4, "service_tier": "interactive"}
    _, headers, _ = await post(pair, "/v1/completions", body)
    pair.engine.pause()
    waiting = pair.stub().Generate(pb.GenerateRequest(spec=SPEC))
    await pair.engine.wait_for(lambda: pair.engine.num_open == 1)
    skip(int(headers["x-chairlift-retry-ms"]) / 1000)
    await backlog(pair, 0)
    ticket = {TICKET: headers[TICKET]}
    status, _, answer = await post(pair, "/v1/completions", body, **ticket)
    assert (status, answer["error"]["code"]) == (429, "queue_full"), answer
    pair.engine.resume()
    await waiting
    status, _, answer = await post(pair, "/v1/completions", body, **ticket)
    assert status == 200, answer


async def test_a_prompt_that_turns_out_far_longer_is_refused_before_the_engine_has_it(make):
    pair = await make()
    await backlog(pair, 0, rate=500.0)
    spec = spec_of()
    spec.text = "\u20ac" * 1000  # 250 tokens by its characters, 3,000 by its bytes
    error = await refused(pair.stub().Generate(pb.GenerateRequest(spec=spec)))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error.details().endswith("; it takes 6 s without any other request")
    assert not pair.engine.submissions


async def test_a_refusal_of_the_engine_gets_a_slot(make):
    pair = await make()
    await backlog(pair, 0)
    pair.engine.tokens_per_step = 1000

    def refuse(step):
        for completion in step.completions:
            completion.reason = engine_pb.COMPLETION_REASON_INFEASIBLE
            completion.num_output_tokens = 0
        if step.completions:
            for column in ("handles", "token_ids", "start_indices", "token_counts", "epochs", "first_tokens"):
                step.ClearField(column)
        return [step]

    pair.engine.rewrite_step = refuse
    error = await refused(pair.stub().Generate(pb.GenerateRequest(spec=spec_of())))
    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert error.details() == "the first token can no longer be in time"
    assert retry_info(error) > 0
    assert dict(error.trailing_metadata())[TICKET]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[classes.a]\nttft_ms = -1", r"--service-classes .*\[classes.a\] ttft_ms is -1"),
        ("[classes", r"--service-classes .*classes.toml: "),
        (None, r"--service-classes .*classes.toml: No such file"),
    ],
)
async def test_bad_class_files_are_one_line(tmp_path, text, message):
    path = tmp_path / "classes.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        FrontendApp(FrontendConfig(service_classes=path))
    assert "\n" not in str(caught.value)


async def test_bad_ticket_keys_are_one_line(tmp_path):
    path = tmp_path / "key"
    with pytest.raises(ConfigError, match=r"--retry-ticket-key-file .*key cannot be read: No such file"):
        FrontendApp(FrontendConfig(retry_ticket_key_file=path))
    path.write_bytes(b"short")
    with pytest.raises(ConfigError, match=r"--retry-ticket-key-file .*key has 5 bytes, at least 16 are needed"):
        FrontendApp(FrontendConfig(retry_ticket_key_file=path))


def test_workers_with_classes_need_a_common_ticket_key(tmp_path):
    with pytest.raises(ConfigError, match="--service-classes with --workers 2 needs --retry-ticket-key-file"):
        FrontendConfig(workers=2, service_classes=tmp_path)
