"""Makes the Target of a TargetSpec."""

import os
from collections.abc import Mapping
from dataclasses import replace
from urllib.parse import urlsplit

from loadgen.errors import TargetError
from loadgen.target.base import Api, Target, TargetFacts, TargetSpec
from loadgen.target.null import NullTarget
from loadgen.target.probe import PROBE_TIMEOUT_S

SCHEMES: Mapping[Api, tuple[str, ...]] = {
    "grpc": ("grpc", "grpcs", "grpc+unix"),
    "completions": ("http", "https"),
    "chat": ("http", "https"),
    "null": ("null",),
}


def open_target(spec: TargetSpec, *, probe_timeout_s: float = PROBE_TIMEOUT_S) -> Target:
    """Returns the target; opens no connection yet. Must be called inside the event loop that will use it.

    Args:
        spec: where and how to ask; without an api_key, HTTP takes that of the environment variable OPENAI_API_KEY, gRPC
            that of CHAIRLIFT_API_KEY.
        probe_timeout_s: for a server to say what it serves, seconds.
    Raises: TargetError: as `check_spec`, or a file for TLS is of no use.
    """
    spec = replace(spec, api_key=spec.api_key or api_key_of(spec.api))
    check_spec(spec)
    if spec.api == "null":
        return NullTarget(spec)
    if spec.api == "grpc":
        from loadgen.target.chairlift_grpc import ChairliftTarget

        return ChairliftTarget(spec, probe_timeout_s)
    from loadgen.target.openai import OpenAiTarget

    return OpenAiTarget(replace(spec, url=spec.url.rstrip("/")), probe_timeout_s)


async def probe_target(spec: TargetSpec) -> TargetFacts:
    """Returns what a server says of itself, once it has answered a few tokens.

    Raises: TargetError: as `open_target` and `Target.probe`.
    """
    target = open_target(spec)
    try:
        return await target.probe()
    finally:
        await target.close()


def api_key_of(api: Api) -> str:
    """Returns the API key in the environment; "" if there is none."""
    return os.environ.get("CHAIRLIFT_API_KEY" if api == "grpc" else "OPENAI_API_KEY", "")


def check_spec(spec: TargetSpec) -> None:
    """Checks a spec without asking the server.

    Raises: TargetError: URL and API do not belong together, the URL names no host, one of two files for mutual TLS is
        missing, the API key cannot be sent, the API takes no prompts of that kind, or the timeout is not above 0.
    """
    schemes = SCHEMES[spec.api]
    try:
        parts = urlsplit(spec.url)
    except ValueError as error:
        raise TargetError(f"target {spec.url!r}: {error}") from error
    if parts.scheme not in schemes:
        wanted = " or ".join(f"{scheme}:" for scheme in schemes)
        raise TargetError(f"target {spec.url!r} is no address for --api {spec.api}, which takes {wanted}")
    if spec.api != "null" and not (parts.path if parts.scheme == "grpc+unix" else parts.netloc):
        raise TargetError(f"target {spec.url!r} names no host")
    if (spec.tls_cert is None) != (spec.tls_key is None):
        raise TargetError("--tls-cert and --tls-key belong together: one is missing")
    if not (spec.api_key.isascii() and spec.api_key.isprintable()):  # gRPC's own error would contain the key
        raise TargetError("the API key has other characters than printable ASCII")
    if spec.api == "chat" and spec.prompt_mode == "ids":
        raise TargetError("the chat API takes no token ids: use --prompt-mode text, or --api completions")
    if spec.timeout_s is not None and not spec.timeout_s > 0:
        raise TargetError(f"--timeout {spec.timeout_s:g}: must be above 0 seconds")
