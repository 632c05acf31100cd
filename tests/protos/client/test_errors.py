"""Errors are decoded without google.rpc's generated code, which here is the reference."""

import copy
import pickle

import grpc
import pytest
from google.protobuf.any_pb2 import Any
from google.rpc import error_details_pb2, status_pb2

from chairlift.client.errors import FieldViolation, GenerationError, generation_error


class FailedCall(grpc.RpcError):
    def __init__(self, code, details, metadata):
        super().__init__()
        self._answers = (code, details, metadata)

    def code(self):
        return self._answers[0]

    def details(self):
        return self._answers[1]

    def trailing_metadata(self):
        return self._answers[2]


def status_metadata(*details):
    status = status_pb2.Status(code=3, message="not shown twice")
    for detail in details:
        packed = Any()
        packed.Pack(detail)
        status.details.append(packed)
    return (("other", "x"), ("grpc-status-details-bin", status.SerializeToString()))


def test_all_details_are_read():
    violations = [
        error_details_pb2.BadRequest.FieldViolation(field="spec.sampling.temperature", description="is -1"),
        error_details_pb2.BadRequest.FieldViolation(field="spec.stop.stop_texts", description="é"),
    ]
    retry = error_details_pb2.RetryInfo()
    retry.retry_delay.FromMilliseconds(1250)
    metadata = status_metadata(
        error_details_pb2.ErrorInfo(reason="INVALID_REQUEST", domain="chairlift"),
        error_details_pb2.DebugInfo(detail="ignored"),
        error_details_pb2.BadRequest(field_violations=violations),
        retry,
    )
    error = generation_error(FailedCall(grpc.StatusCode.INVALID_ARGUMENT, "bad", metadata))
    assert error.status is grpc.StatusCode.INVALID_ARGUMENT
    assert error.message == "bad"
    assert str(error) == "INVALID_ARGUMENT: bad"
    assert error.reason == "INVALID_REQUEST"
    assert error.field_violations == (
        FieldViolation("spec.sampling.temperature", "is -1"),
        FieldViolation("spec.stop.stop_texts", "é"),
    )
    assert error.retry_delay_s == 1.25


def test_the_ticket_of_a_refusal_is_read():
    metadata = (*status_metadata(), ("x-chairlift-retry-ticket", "abc"))
    assert generation_error(FailedCall(grpc.StatusCode.RESOURCE_EXHAUSTED, "late", metadata)).retry_ticket == b"abc"
    assert generation_error(FailedCall(grpc.StatusCode.RESOURCE_EXHAUSTED, "late", ())).retry_ticket == b""


@pytest.mark.parametrize("metadata", [None, (), (("grpc-status-details-bin", b"\xff\xff garbage"),)])
def test_without_readable_details_the_status_stands_alone(metadata):
    error = generation_error(FailedCall(grpc.StatusCode.UNAVAILABLE, None, metadata))
    assert str(error) == "UNAVAILABLE: no reason given"
    assert (error.reason, error.field_violations, error.retry_delay_s) == ("", (), None)


@pytest.mark.parametrize("copied", [lambda error: pickle.loads(pickle.dumps(error)), copy.copy], ids=["pickle", "copy"])
def test_an_error_survives_the_way_between_processes(copied):
    error = GenerationError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        "late",
        reason="TARGETS_INFEASIBLE",
        field_violations=(FieldViolation("spec", "is bad"),),
        retry_delay_s=1.5,
        retry_ticket=b"t",
    )
    error.add_note("prompt 1 of 3")
    other = copied(error)
    assert type(other) is GenerationError
    assert str(other) == str(error) == "RESOURCE_EXHAUSTED: late"
    assert vars(other) == vars(error)
