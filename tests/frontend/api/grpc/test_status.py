import base64
import urllib.parse

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from frontend import errors
from frontend.api.grpc import status
from frontend.api.http.errors import error_object


def all_subclasses(cls):
    return {cls, *(deeper for sub in cls.__subclasses__() for deeper in all_subclasses(sub))}


def test_every_request_error_has_a_row():
    assert set(status._CODES) == all_subclasses(errors.RequestError) - {errors.RequestError}


def test_no_error_is_unknown_or_ok():
    codes = set(status._CODES.values())
    assert not codes & {grpc.StatusCode.UNKNOWN, grpc.StatusCode.OK}


def unpacked(error):
    code, details, metadata = status.error_status(error)
    values = dict(metadata)
    message = status_pb2.Status.FromString(values.pop("grpc-status-details-bin"))
    assert (message.code, message.message) == (code.value[0], details)
    found = {}
    for detail in message.details:
        for kind in (error_details_pb2.ErrorInfo, error_details_pb2.BadRequest, error_details_pb2.RetryInfo):
            if detail.Is(kind.DESCRIPTOR):
                found[kind] = kind()
                detail.Unpack(found[kind])
    return code, found, values


def test_field_error_names_its_field():
    code, found, values = unpacked(errors.InvalidRequest("top_p is 2", field="spec.sampling.top_p"))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    (violation,) = found[error_details_pb2.BadRequest].field_violations
    assert (violation.field, violation.description) == ("spec.sampling.top_p", "top_p is 2")
    assert found[error_details_pb2.ErrorInfo].domain == "chairlift"
    assert values == {}


def test_half_a_surrogate_pair_in_a_message_is_escaped():
    code, found, _ = unpacked(errors.InvalidRequest("properties.\ud800 has é", field="spec.structured_output"))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    (violation,) = found[error_details_pb2.BadRequest].field_violations
    assert violation.description == "properties.\\ud800 has é"


@pytest.mark.parametrize("letter", ["x", "\u00e9", "\u5b57", "\U0001f600"])
def test_status_of_a_long_message_fits_into_the_metadata_that_clients_accept(letter):
    error = errors.InvalidRequest("bad: " + letter * 50_000, field="spec.structured_output.json_schema")
    code, details, metadata = status.error_status(error)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith("bad: " + letter * 200)
    assert details.endswith(letter + "...")
    num_bytes = len(urllib.parse.quote(details))
    for key, value in metadata:
        num_bytes += len(key) + (len(base64.b64encode(value)) if key.endswith("-bin") else len(value)) + 32
    assert num_bytes < 7 << 10  # of 8 KiB
    unpacked(error)


def test_retry_delay_is_in_details_and_pushback():
    code, found, values = unpacked(errors.QueueFull("full", retry_after_s=1.2345))
    assert code is grpc.StatusCode.RESOURCE_EXHAUSTED
    retry_ms = found[error_details_pb2.RetryInfo].retry_delay.ToMilliseconds()
    assert 1235 <= retry_ms <= 2469
    assert values == {"grpc-retry-pushback-ms": str(retry_ms)}


def test_clients_that_are_refused_together_do_not_come_back_together():
    error = errors.EngineUnavailable("away", retry_after_s=2.0)
    for delays in (
        {unpacked(error)[2]["grpc-retry-pushback-ms"] for _ in range(200)},
        {error_object(error).headers["retry-after-ms"] for _ in range(200)},
    ):
        assert 16 < len(delays) <= 32
        assert 2000 <= min(map(int, delays)) < max(map(int, delays)) < 4000


@pytest.mark.parametrize("error", [ZeroDivisionError("a secret"), errors.ConfigError("a secret")])
def test_defect_is_internal_and_keeps_its_text_to_itself(error):
    code, found, _ = unpacked(error)
    assert code is grpc.StatusCode.INTERNAL
    assert found[error_details_pb2.ErrorInfo].reason == "INTERNAL_ERROR"
    assert "secret" not in status.error_status(error).details
