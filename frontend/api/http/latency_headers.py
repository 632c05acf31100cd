"""Latency targets of an HTTP call: the headers that gateways send, and the body's service tier."""

import math
from collections.abc import Mapping

from google.protobuf.duration import from_nanoseconds
from google.protobuf.duration_pb2 import Duration

from chairlift.service.service_classes import MAX_TARGET_MS
from chairlift.v1 import generation_service_pb2 as pb
from frontend.api.http.errors import TICKET_HEADER, BodyError
from frontend.limits import MAX_ID_CHARS
from frontend.request.latency_targets import SERVERS_CHOICE

TTFT_HEADER = "x-slo-ttft-ms"
INTER_TOKEN_HEADER = "x-slo-tpot-ms"
OBJECTIVE_HEADER = "x-gateway-inference-objective"


def latency_targets(headers: Mapping[str, str], service_tier: str) -> pb.LatencyTargets | None:
    """Returns the targets of a call; None: it sets none. `frontend.request.latency_targets` checks their meaning.

    Args:
        service_tier: of the body; empty: none. It precedes the gateway's objective.

    Raises:
        BodyError: a header is not a number of milliseconds, or out of range.
    """
    ttft, inter_token = _duration(headers, TTFT_HEADER), _duration(headers, INTER_TOKEN_HEADER)
    service_class = headers.get(OBJECTIVE_HEADER, "") if service_tier in SERVERS_CHOICE else ""
    service_class = service_class or service_tier
    ticket = headers.get(TICKET_HEADER, "")
    if ttft is None and inter_token is None and not service_class and not ticket:
        return None
    return pb.LatencyTargets(
        ttft=ttft, inter_token=inter_token, service_class=service_class, retry_ticket=ticket.encode()
    )


def _duration(headers: Mapping[str, str], name: str) -> Duration | None:
    text = headers.get(name)
    if text is None:
        return None
    try:
        milliseconds = float(text)
    except ValueError:
        milliseconds = math.nan
    if not 0 < milliseconds <= MAX_TARGET_MS:
        shown = text[:MAX_ID_CHARS]
        raise BodyError(
            400,
            f"{name} is {shown!r}, it must be a number of milliseconds above 0, at most {MAX_TARGET_MS:.0f}",
            param=name,
        )
    return from_nanoseconds(max(round(milliseconds * 1e6), 1))
