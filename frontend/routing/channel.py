"""Opens the gRPC channel to one engine."""

import grpc

from chairlift.service.engine_protocol import MAX_FRONTEND_MESSAGE_BYTES
from frontend.access.engine_tls import EngineTls
from frontend.engine_address import EngineAddress, EngineKind

# A stopped process or a vanished machine does not answer gRPC pings. A busy process does, because gRPC answers them on
# threads that do not need the GIL; heartbeats need it. On two cores at load 14 to 27, with steps of up to 51 s, no ping
# was missed in 90 s (limit 1.75 s), and heartbeats came at most 0.70 s apart. Pings time out a little earlier than
# heartbeats, so that the log shows which of the two was missed. As fractions of the heartbeat timeout:
_PING_EVERY = 1 / 3  # engines accept one ping per second
_PING_TIMEOUT = 0.55
_MIN_PING_EVERY_MS = 500
_MAX_FOREIGN_MESSAGE_BYTES = 64 << 20  # one message holds the log-probabilities of a whole prompt
_OPTIONS = (
    ("grpc.max_send_message_length", MAX_FRONTEND_MESSAGE_BYTES),
    # A separate connection for each attempt, so that gRPC adds no backoff of its own.
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_retries", 0),
    # http_proxy in the environment is for connections to the internet.
    ("grpc.enable_http_proxy", 0),
)


def engine_channel(
    address: EngineAddress, *, heartbeat_timeout_s: float, tls: EngineTls | None, server_name: str | None
) -> grpc.aio.Channel:
    """Returns a channel, which connects with its first call.

    Args:
        address: where the engine listens, and its kind.
        heartbeat_timeout_s: silence after which it is lost; pings time out earlier.
        tls: certificates; None disables TLS.
        server_name: name that the engine's certificate must have, if it differs from the address.
    """
    if address.kind is EngineKind.CHAIRLIFT:
        options = [*_OPTIONS, *_pings(heartbeat_timeout_s)]
        options.append(("grpc.max_receive_message_length", MAX_FRONTEND_MESSAGE_BYTES))
    else:  # without pings: polls detect silence, and some servers end connections that ping
        options = [*_OPTIONS, ("grpc.max_receive_message_length", _MAX_FOREIGN_MESSAGE_BYTES)]
    if tls is None:
        return grpc.aio.insecure_channel(address.target, options=options)
    name = [("grpc.ssl_target_name_override", server_name)] if server_name else []
    return grpc.aio.secure_channel(address.target, tls.credentials(), options=[*options, *name])


def _pings(heartbeat_timeout_s: float) -> list[tuple[str, int]]:
    every_ms = round(1000 * heartbeat_timeout_s * _PING_EVERY)
    timeout_ms = round(1000 * heartbeat_timeout_s * _PING_TIMEOUT)
    return [
        ("grpc.keepalive_time_ms", max(every_ms, _MIN_PING_EVERY_MS)),
        ("grpc.keepalive_timeout_ms", timeout_ms),
        # Required: without it grpc 1.85 keeps the connection to a stopped peer.
        ("grpc.http2.ping_timeout_ms", timeout_ms),
    ]
