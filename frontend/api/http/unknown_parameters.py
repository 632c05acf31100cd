"""Policy for unknown request parameters (`--unknown-parameters`): ignore, warn (header and log line) or refuse.

Names come from clients: they are escaped, truncated and limited in number before they are shown.
"""

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from urllib.parse import quote

from frontend.api.http.bodies import Body
from frontend.api.http.errors import BodyError

HEADER = "x-chairlift-ignored-parameters"
MAX_NAMES = 16
MAX_NAME_CHARS = 64
LOG_INTERVAL_S = 60.0

logger = logging.getLogger(__name__)


class UnknownParameters:
    """The policy for unknown parameters.

    Args:
        policy: "ignore", "warn" or "refuse".
        clock: returns the time in seconds, for the interval between log lines.
    """

    def __init__(self, policy: str, clock: Callable[[], float] | None = None) -> None:
        self._policy = policy
        self._clock = clock or time.monotonic
        self._num_requests = 0  # since the last line
        self._names: dict[str, None] = {}  # of these, in order
        self._next_line_at_s = float("-inf")

    def headers(self, body: Body) -> Mapping[str, str]:
        """Returns the response headers for a body.

        Raises:
            BodyError: the body has an unknown parameter and the policy is refuse.
        """
        if self._policy == "ignore":
            return {}
        unknown = body.unknown_parameters()
        first = next(unknown, None)
        if first is None:
            return {}
        if self._policy == "refuse":
            name = _escaped(first)
            message = f"{name!r} is not a parameter of this server, which refuses unknown ones (--unknown-parameters)"
            raise BodyError(400, message, param=name, code="unknown_parameter")
        names = [_escaped(name) for name in itertools.islice(itertools.chain([first], unknown), MAX_NAMES + 1)]
        self._log(names)
        return {HEADER: _listed(names)}

    def _log(self, names: Iterable[str]) -> None:
        self._num_requests += 1
        for name in names:
            if len(self._names) <= MAX_NAMES:
                self._names[name] = None
        now_s = self._clock()
        if now_s < self._next_line_at_s:
            return
        logger.warning(
            "ignored unknown parameters of %d HTTP request%s: %s (at most one such line in %g s; --unknown-parameters "
            "refuse answers such requests with 400)",
            self._num_requests,
            "" if self._num_requests == 1 else "s",
            _listed(list(self._names)),
            LOG_INTERVAL_S,
        )
        self._next_line_at_s = now_s + LOG_INTERVAL_S
        self._num_requests = 0
        self._names.clear()


def _escaped(name: str) -> str:
    """Returns a name as printable ASCII without commas and spaces."""
    return quote(name[:MAX_NAME_CHARS], safe="._-[]$@:", errors="backslashreplace")[:MAX_NAME_CHARS]


def _listed(names: list[str]) -> str:
    shown = names[:MAX_NAMES]
    return ", ".join([*shown, "..."] if len(names) > MAX_NAMES else shown)
