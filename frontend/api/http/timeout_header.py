"""How long a call over HTTP may take. HTTP has no word for a deadline: a header or a parameter says it, in seconds.

The server then ends the call by itself, in the engine too, where gRPC would do it. Clients' own timeouts (`timeout=` of
OpenAI's, say, and the `x-stainless-read-timeout` that it sends) are something else: they bound the wait for the next
byte, and end with a closed connection.
"""

from collections.abc import Mapping

from frontend.api.http.errors import BodyError
from frontend.generation.call_deadline import CallDeadline

HEADER = "x-request-timeout"
MAX_TIMEOUT_S = 24 * 3600


def call_deadline(
    headers: Mapping[str, str], timeout_s: float | None, *, arrived_at_s: float, default_s: float
) -> CallDeadline:
    """The deadline of a call: the earlier one if both the header and the body name one.

    Args:
        headers: of the request.
        timeout_s: the body's.
        arrived_at_s: time.monotonic() when the request came.
        default_s: for a call that names none; 0: none then.

    Raises:
        BodyError: it is no number of seconds, or out of range.
    """
    timeouts_s = [] if timeout_s is None else [_checked("timeout", timeout_s, timeout_s)]
    if (text := headers.get(HEADER)) is not None:
        try:
            timeouts_s.append(_checked(HEADER, float(text), text[:64]))
        except ValueError:
            raise _out_of_range(HEADER, repr(text[:64])) from None
    if not timeouts_s and not default_s:
        return CallDeadline(None)
    return CallDeadline(arrived_at_s + min(timeouts_s, default=default_s))


def _checked(name: str, timeout_s: float, shown: object) -> float:
    if not 0 < timeout_s <= MAX_TIMEOUT_S:
        raise _out_of_range(name, shown)
    return timeout_s


def _out_of_range(name: str, shown: object) -> BodyError:
    return BodyError(
        400, f"{name} is {shown}, it must be a number of seconds above 0 and at most {MAX_TIMEOUT_S}", param=name
    )
