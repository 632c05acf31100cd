"""The server's own metrics, kept beside a run: Prometheus text before and after, uninterpreted."""

import urllib.request

from loadgen.errors import TargetError

_TIMEOUT_S = 5.0
_LARGEST_BYTES = 4 << 20


def read_server_metrics(url: str) -> str:
    """Prometheus text.

    Raises: TargetError: nobody answers within seconds, or not with text of a sensible size.
    """
    if not url.startswith(("http://", "https://")):
        raise TargetError(f"--metrics-url {url}: must begin with http:// or https://")
    try:
        with urllib.request.urlopen(url, timeout=_TIMEOUT_S) as response:
            content: bytes = response.read(_LARGEST_BYTES + 1)
    except (OSError, ValueError) as error:
        raise TargetError(f"--metrics-url {url}: {getattr(error, 'reason', None) or error}") from error
    if len(content) > _LARGEST_BYTES:
        raise TargetError(f"--metrics-url {url}: answers with more than {_LARGEST_BYTES} bytes")
    return content.decode(errors="replace")
