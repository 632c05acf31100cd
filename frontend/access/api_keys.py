"""API keys of a server, and the check of a call's key.

Knows neither gRPC nor HTTP: both APIs pass the values of `authorization`, HTTP also those of `x-api-key`. Only digests
of keys are kept, and no message contains a key.
"""

import hashlib
import hmac
from collections.abc import Sequence
from pathlib import Path

from frontend.errors import ConfigError, Unauthenticated

MAX_KEY_CHARS = 1024


class ApiKeys:
    """The keys that a server accepts; without any, calls need none.

    Args:
        keys: as returned by `load_keys`.
    """

    def __init__(self, keys: Sequence[str]) -> None:
        self.replace(keys)

    def replace(self, keys: Sequence[str]) -> None:
        """Replaces all keys; running calls go on."""
        self._digests = [_digest(key.encode()) for key in keys]

    @property
    def required(self) -> bool:
        """Whether calls need a key."""
        return bool(self._digests)

    def check(self, authorizations: Sequence[str | bytes], bare_keys: Sequence[bytes] = ()) -> None:
        """Checks the key of a call in constant time.

        Args:
            authorizations: all values of the call's `authorization`; exactly one `Bearer KEY` is valid.
            bare_keys: all values of a header that contains only a key; exactly one may replace `authorization`.

        Raises:
            Unauthenticated: no valid key; the message is the same in all cases.
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
        for known in self._digests:  # always all, for constant time
            is_known |= hmac.compare_digest(known, digest)
        return is_known


class Access:
    """The keys of a server: those of its clients, and those of its administrators, which open everything.

    Without keys for administration, clients' keys open it too.

    Args:
        keys: of clients, as returned by `load_keys`.
        admin_keys: of administrators, likewise.
    """

    def __init__(self, keys: Sequence[str], admin_keys: Sequence[str] = ()) -> None:
        self.clients, self.administration = ApiKeys(()), ApiKeys(())
        self.replace(keys, admin_keys)

    def replace(self, keys: Sequence[str], admin_keys: Sequence[str]) -> None:
        """Replaces all keys; running calls go on."""
        self.clients.replace([*keys, *admin_keys] if keys else ())
        self.administration.replace(admin_keys or keys)


def load_keys(keys: Sequence[str], path: Path | None, *, flag: str = "--api-key") -> tuple[str, ...]:
    """Returns the keys of flags and file. The file has one key per line; empty lines and lines with # are ignored.

    Args:
        keys: of the flag.
        path: of the flag of the file; None: without.
        flag: its name, to which that of the file adds `-file`.

    Raises:
        ConfigError: a key that no header can carry, or a file that cannot be read or has none.
    """
    for key in keys:
        _check(key, flag)
    if path is None:
        return tuple(keys)
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"{flag}-file {path} cannot be read: {reason}") from error
    in_file = []
    for number, line in enumerate(lines, 1):
        if line and not line.startswith("#"):
            _check(line, f"{flag}-file {path}, line {number}")
            in_file.append(line)
    if not in_file:
        raise ConfigError(f"{flag}-file {path} contains no key: it needs one per line")
    return (*keys, *in_file)


def _check(key: str, where: str) -> None:
    if not (0 < len(key) <= MAX_KEY_CHARS and key.isascii() and key.isprintable() and " " not in key):
        raise ConfigError(f"{where}: a key has 1 to {MAX_KEY_CHARS} printable ASCII characters and no spaces")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
