"""The server's own metrics, kept beside a run: Prometheus text before and after, uninterpreted."""

import urllib.request
from http.client import HTTPException
from urllib.parse import urlsplit

from loadgen.direct_http import direct_opener
from loadgen.errors import TargetError
from loadgen.target.base import TargetSpec
from loadgen.target.tls import ssl_context

_TIMEOUT_S = 5.0
_MAX_BYTES = 4 << 20


def read_server_metrics(url: str, spec: TargetSpec) -> str:
    """Prometheus text.

    Args:
        url: where it is.
        spec: the server under load, whose certificates count here too, and its API key if it is on the same host and
            does not travel in the clear where it did not before.

    Raises: TargetError: no answer within seconds, or one that is not text of a sensible size.
    """
    if not url.startswith(("http://", "https://")):
        raise TargetError(f"--metrics-url {url}: must begin with http:// or https://")
    context = ssl_context(spec) if url.startswith("https:") else None
    try:
        request = urllib.request.Request(url)
        if spec.api_key and _may_have_key(url, spec.url):
            request.add_unredirected_header("Authorization", f"Bearer {spec.api_key}")
        with direct_opener(context).open(request, timeout=_TIMEOUT_S) as response:
            content: bytes = response.read(_MAX_BYTES + 1)
    except (OSError, ValueError) as error:
        raise TargetError(f"--metrics-url {url}: {getattr(error, 'reason', None) or error}") from error
    except HTTPException as error:  # its text may hold the bytes that came
        raise TargetError(
            f"--metrics-url {url}: {type(error).__name__}: no HTTP address, or no HTTP/1.1 there"
        ) from error
    if len(content) > _MAX_BYTES:
        raise TargetError(f"--metrics-url {url}: answers with more than {_MAX_BYTES} bytes")
    return content.decode(errors="replace")


def _may_have_key(url: str, target: str) -> bool:
    is_secret = urlsplit(target).scheme in ("grpcs", "https")
    same_host = urlsplit(url).hostname == urlsplit(target).hostname
    return same_host and (url.startswith("https:") or not is_secret)
