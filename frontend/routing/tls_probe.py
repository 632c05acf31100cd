"""Why an engine closes connections: gRPC says "Socket closed" alone, whatever TLS has to say."""

import asyncio
import contextlib
import ssl

_TIMEOUT_S = 2.0
_REFUSED = (
    "the engine does not accept this frontend's certificate, or got none: it must be given as --engine-tls-client-cert "
    "and be signed by the engine's --tls-client-ca"
)


async def tls_trouble(address: str, context: ssl.SSLContext | None, server_name: str | None) -> str | None:
    """Shakes hands with an engine once, and says what is wrong; None: nothing is, as far as can be seen.

    Args:
        address: HOST:PORT.
        context: with the frontend's certificates; None: it speaks no TLS.
        server_name: that the engine's certificate must be for; None: the address's host.
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
                    return "the engine speaks TLS: --engine-tls-ca and --engine-tls-client-cert are needed"
                if not await reader.read(1):  # with TLS 1.3 a refused certificate shows here; else there are SETTINGS
                    return _REFUSED
            finally:
                writer.close()
                with contextlib.suppress(OSError):
                    await writer.wait_closed()
    except ssl.SSLCertVerificationError as error:
        return f"--engine-tls-ca does not accept the engine's certificate: {error.verify_message}"
    except ssl.SSLError as error:
        if context is None:
            return None  # it speaks none
        if error.reason == "WRONG_VERSION_NUMBER":
            return "the engine speaks no TLS, and this frontend does: see --engine-tls-ca"
        return _REFUSED
    except (OSError, TimeoutError):
        pass
    return None


def _trusting_context() -> ssl.SSLContext:
    """Accepts any certificate: nothing is sent but the handshake."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context
