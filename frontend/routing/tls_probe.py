"""Finds out why an engine closes connections: gRPC reports every TLS problem as "Socket closed"."""

import asyncio
import contextlib
import ssl

_TIMEOUT_S = 2.0
_REFUSED = (
    "the engine does not accept this frontend's certificate, or got none: set --engine-tls-client-cert to one that the "
    "engine's --tls-client-ca has signed"
)


async def tls_problem(address: str, context: ssl.SSLContext | None, server_name: str | None) -> str | None:
    """Makes one TLS handshake with an engine and returns what is wrong; None: nothing was found.

    Args:
        address: HOST:PORT.
        context: with the frontend's certificates; None: the frontend uses no TLS.
        server_name: the name that the engine's certificate must be for; None: the address's host.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    probe = context or _trusting_context()
    probe.set_alpn_protocols(["h2"])
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            reader, writer = await asyncio.open_connection(
                host, int(port), ssl=probe, server_hostname=server_name or host
            )
            try:
                if context is None:
                    return "the engine requires TLS: set --engine-tls-ca and --engine-tls-client-cert"
                if not await reader.read(1):  # TLS 1.3 rejects a certificate only here; otherwise SETTINGS arrive
                    return _REFUSED
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
    except ssl.SSLCertVerificationError as error:
        return f"--engine-tls-ca does not accept the engine's certificate: {error.verify_message}"
    except ssl.SSLError as error:
        if context is None:
            return None  # the engine uses none either
        if error.reason == "WRONG_VERSION_NUMBER":
            return "the engine uses no TLS but this frontend does: unset --engine-tls-ca, or set TLS up on the engine"
        return _REFUSED
    except (OSError, TimeoutError):
        pass
    return None


def _trusting_context() -> ssl.SSLContext:
    """Accepts any certificate, because nothing but the handshake is sent."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
