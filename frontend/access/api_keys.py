"""API keys: which a server was given, and whether a call carries one of them.

Knows neither gRPC nor HTTP: both doors hand over the values of `authorization`, HTTP those of `x-api-key` too. A key is
kept as its digest only, and nothing here puts one into a message.
"""

import hashlib
import hmac
from collections.abc import Sequence
from pathlib import Path

from frontend.errors import ConfigError, Unauthenticated

MAX_KEY_CHARS = 1024


class ApiKeys:
    """The keys that open a server; without any, everybody may call.

    Args:
        keys: as `load_keys` gives them.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self.replace(keys)

    def replace(self, keys: Sequence[str]) -> None:
        """From now on these open the server, and no others; calls under way go on."""
        self._digests = [_digest(key.encode()) for key in keys]

    @property
    def required(self) -> bool:
        """Whether calls need a key."""
        return bool(self._digests)

    def check(self, authorizations: Sequence[str | bytes], bare_keys: Sequence[bytes] = ()) -> None:
        """Lets a call pass or not, in a time that says nothing of the keys.

        Args:
            authorizations: every value of `authorization` that came with the call; `Bearer KEY` is wanted, once.
            bare_keys: every value of a header that holds nothing but a key; exactly one may stand in for a valid
                `authorization`.

        Raises:
            Unauthenticated: none of the keys; the message is the same whatever is wrong.
        """
        if not self._digests:
            return
        value = authorizations[0] if len(authorizations) == 1 else b""
        scheme, _, key = (value.encode() if isinstance(value, str) else value).partition(b" ")
        is_bearer = self._knows(key.strip()) and scheme.lower() == b"bearer"
        if not is_bearer and not (len(bare_keys) == 1 and self._knows(bare_keys[0].strip())):
            raise Unauthenticated("a valid API key is needed, as in `authorization: Bearer KEY`")

    def _knows(self, key: bytes) -> bool:
        digest = _digest(key)
        is_known = False
        for known in self._digests:  # all of them, whichever fits
            is_known |= hmac.compare_digest(known, digest)
        return is_known


def load_keys(keys: Sequence[str], path: Path | None) -> tuple[str, ...]:
    """The keys of the flags and of the file, which has one in a line; empty lines and lines that begin with # are none.

    Raises:
        ConfigError: a key that no header can carry, or a file that cannot be read or holds none.
    """
    for key in keys:
        _check(key, "--api-key")
    if path is None:
        return tuple(keys)
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"--api-key-file {path} cannot be read: {reason}") from error
    in_file = []
    for number, line in enumerate(lines, 1):
        if line and not line.startswith("#"):
            _check(line, f"--api-key-file {path}, line {number}")
            in_file.append(line)
    if not in_file:
        raise ConfigError(f"--api-key-file {path} holds no key: it takes one in a line")
    return (*keys, *in_file)


def _check(key: str, where: str) -> None:
    if not (0 < len(key) <= MAX_KEY_CHARS and key.isascii() and key.isprintable() and " " not in key):
        raise ConfigError(f"{where}: a key has 1 to {MAX_KEY_CHARS} printable ASCII characters and no spaces")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
