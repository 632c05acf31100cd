"""Latency targets of a request: from the public proto, the service classes and the caller to one checked value."""

import math
from collections.abc import Mapping

from google.protobuf.duration_pb2 import Duration

from chairlift.service.service_classes import MAX_TARGET_MS, ServiceClass
from chairlift.v1 import generation_service_pb2 as pb
from frontend.access.caller import Caller
from frontend.errors import InvalidRequest
from frontend.limits import MAX_ID_CHARS
from frontend.request.checks import duration_s
from frontend.types import LatencyTargets

MAX_TARGET_S = MAX_TARGET_MS / 1000
MAX_TOKENS_PER_SECOND = 1e6
MAX_TICKET_BYTES = 256
SERVERS_CHOICE = ("", "auto", "default")
"""Names that leave the class to the server, as OpenAI's `service_tier` has them."""

_PATH = "spec.latency_targets"


def latency_targets(
    spec: pb.GenerationSpec, classes: Mapping[str, ServiceClass], caller: Caller
) -> LatencyTargets | None:
    """Returns the targets of a request; None: it sets none, and the server has no classes.

    Targets that the request sets replace those of its class. If its API key is bound to classes, they must not be
    tighter, because all classes share the engines.

    Args:
        spec: as received.
        classes: of the server, by name.
        caller: of the call.

    Raises:
        InvalidRequest: a target out of range, targets that contradict each other, or an unknown class.
    """
    if not classes and not spec.HasField("latency_targets"):
        return None
    message = spec.latency_targets
    ttft_s = _target_s(message, "ttft")
    inter_token_s = _inter_token_s(message)
    ticket = _ticket(message.retry_ticket)
    is_own = ttft_s is not None or inter_token_s is not None
    service_class = _service_class(message.service_class, classes, caller)
    if service_class is None:
        if not (is_own or ticket or classes):
            return None
        service_class = ServiceClass(name="")
    elif caller.classes:
        _check_not_tighter("ttft", ttft_s, service_class.ttft_s, service_class.name)
        _check_not_tighter("inter_token", inter_token_s, service_class.inter_token_s, service_class.name)
    targets = LatencyTargets(
        ttft_s=service_class.ttft_s if ttft_s is None else ttft_s,
        inter_token_s=service_class.inter_token_s if inter_token_s is None else inter_token_s,
        service_class=service_class.name,
        value=service_class.weight,
        pacing=service_class.pacing,
        when_infeasible=service_class.when_infeasible,
        headroom=service_class.headroom,
        tenant=caller.tenant,
        retry_ticket=ticket,
        is_own=is_own,
    )
    if ticket and not targets.may_be_refused:
        raise InvalidRequest(
            "retry_ticket needs a service class with a first-token target that refuses (when_infeasible), as the "
            "refused request had",
            field=f"{_PATH}.retry_ticket",
        )
    return targets


def _target_s(message: pb.LatencyTargets, name: str) -> float | None:
    if not message.HasField(name):
        return None
    field = f"{_PATH}.{name}"
    duration: Duration = getattr(message, name)
    seconds = duration_s(duration, name, field)
    if not 0 < seconds <= MAX_TARGET_S:
        raise InvalidRequest(f"{name} is {seconds:g} s, it must be above 0 and at most {MAX_TARGET_S:g} s", field=field)
    return seconds


def _inter_token_s(message: pb.LatencyTargets) -> float | None:
    inter_token_s = _target_s(message, "inter_token")
    if not message.HasField("min_tokens_per_second"):
        return inter_token_s
    field, rate = f"{_PATH}.min_tokens_per_second", message.min_tokens_per_second
    if inter_token_s is not None:
        raise InvalidRequest(
            f"min_tokens_per_second is {rate:g} and inter_token is {inter_token_s:g} s: set one of them, each says the "
            "other",
            field=field,
        )
    if not (0 < rate <= MAX_TOKENS_PER_SECOND and 1 / rate <= MAX_TARGET_S) or math.isnan(rate):
        raise InvalidRequest(
            f"min_tokens_per_second is {rate:g}, it must be at least {1 / MAX_TARGET_S:.3g} and at most "
            f"{MAX_TOKENS_PER_SECOND:.0f}",
            field=field,
        )
    return 1 / rate


def _ticket(ticket: bytes) -> str:
    field = f"{_PATH}.retry_ticket"
    if len(ticket) > MAX_TICKET_BYTES:
        raise InvalidRequest(
            f"retry_ticket has {len(ticket)} bytes, at most {MAX_TICKET_BYTES} are allowed", field=field
        )
    if not ticket.isascii():
        raise InvalidRequest("retry_ticket is no ticket of this server: it has bytes that are not ASCII", field=field)
    return ticket.decode()


def _service_class(name: str, classes: Mapping[str, ServiceClass], caller: Caller) -> ServiceClass | None:
    """Returns the class of a request: the one that it names, else the first one of its API key."""
    if not classes:
        return None
    if name not in classes and name in SERVERS_CHOICE:
        return classes[caller.classes[0]] if caller.classes else None
    field = f"{_PATH}.service_class"
    shown = name[:MAX_ID_CHARS]
    if name not in classes:
        raise InvalidRequest(f"service_class {shown!r} is unknown, this server has {', '.join(classes)}", field=field)
    if caller.classes and name not in caller.classes:
        allowed = ", ".join(caller.classes)
        raise InvalidRequest(f"service_class {shown!r} is not among those of the API key: {allowed}", field=field)
    return classes[name]


def _check_not_tighter(name: str, own_s: float | None, class_s: float | None, class_name: str) -> None:
    if own_s is None or (class_s is not None and own_s >= class_s):
        return
    least = "has none" if class_s is None else f"has {class_s:g} s"
    raise InvalidRequest(
        f"{name} is {own_s:g} s, tighter than service class {class_name!r} of the API key, which {least}",
        field=f"{_PATH}.{name}",
    )
