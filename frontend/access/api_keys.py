"""API keys of a server, and the check of a call's key.

Knows neither gRPC nor HTTP: both APIs pass the values of `authorization`, HTTP also those of `x-api-key`. Only digests
of keys are kept, and no message contains a key.
"""

import hashlib
import hmac
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from chairlift.service.engine_protocol import MAX_TENANT_BYTES
from frontend.access.caller import ANYBODY, Caller, is_tenant
from frontend.errors import ConfigError, Unauthenticated

MAX_KEY_CHARS = 1024
_TENANT_DIGITS = 12


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key and who calls with it.

    Attributes:
        where: flag, or file and line, for errors.
    """

    text: str
    caller: Caller
    where: str


class ApiKeys:
    """The keys that a server accepts; without any, calls need none.

    Args:
        keys: as returned by `load_keys`.
    """

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self.replace(keys)

    def replace(self, keys: Sequence[ApiKey]) -> None:
        """Replaces all keys; running calls continue."""
        self._digests = [_digest(key.text.encode()) for key in keys]
        self._callers = [key.caller for key in keys]

    @property
    def required(self) -> bool:
        """Whether calls need a key."""
        return bool(self._digests)

    def check(self, authorizations: Sequence[str | bytes], bare_keys: Sequence[bytes] = ()) -> Caller:
        """Checks the key of a call in constant time, and returns its caller.

        Args:
            authorizations: all values of the call's `authorization`; exactly one `Bearer KEY` is valid.
            bare_keys: all values of a header that contains only a key; exactly one may replace `authorization`.

        Raises:
            Unauthenticated: no valid key; the message is the same in all cases.
        """
        if not self._digests:
            return ANYBODY
        value = authorizations[0] if len(authorizations) == 1 else b""
        scheme, _, key = (value.encode() if isinstance(value, str) else value).partition(b" ")
        found = self._find(key.strip())
        if found < 0 or scheme.lower() != b"bearer":
            found = self._find(bare_keys[0].strip()) if len(bare_keys) == 1 else -1
        if found < 0:
            raise Unauthenticated("a valid API key is needed, as in `authorization: Bearer KEY`")
        return self._callers[found]

    def _find(self, key: bytes) -> int:
        """Returns the index of a key, or -1."""
        digest = _digest(key)
        found = -1
        for index, known in enumerate(self._digests):  # always all, for constant time
            found += (index - found) * hmac.compare_digest(known, digest)
        return found


class Access:
    """The keys of a server: those of its clients, and those of its administrators, which open everything.

    Without keys for administration, clients' keys open it too.

    Args:
        keys: of clients, as returned by `load_keys`.
        admin_keys: of administrators, likewise.
        trusts_gateway: whether callers may name their tenant in a header.

    Attributes:
        trusts_gateway: as given.
    """

    def __init__(
        self, keys: Sequence[ApiKey], admin_keys: Sequence[ApiKey] = (), *, trusts_gateway: bool = False
    ) -> None:
        self.trusts_gateway = trusts_gateway
        self.clients, self.administration = ApiKeys(()), ApiKeys(())
        self.replace(keys, admin_keys)

    def replace(self, keys: Sequence[ApiKey], admin_keys: Sequence[ApiKey]) -> None:
        """Replaces all keys; running calls continue."""
        self.clients.replace([*keys, *admin_keys] if keys else ())
        self.administration.replace(admin_keys or keys)


def load_keys(keys: Sequence[str], path: Path | None, *, flag: str = "--api-key") -> tuple[ApiKey, ...]:
    """Returns the keys of flags and file. The file has one key per line; empty lines and lines with # are ignored.

    Behind its key a line may say who calls with it, as in `KEY class=interactive,batch tenant=acme`: the service
    classes that its requests may have, the first one by default, and the tenant that is charged, by default one per
    key.

    Args:
        keys: of the flag.
        path: of the flag of the file; None: without.
        flag: its name, to which that of the file adds `-file`.

    Raises:
        ConfigError: a key that no header can carry, an unknown field, or a file that cannot be read or has none.
    """
    in_flags = [_api_key(key, Caller(), flag) for key in keys]
    if path is None:
        return tuple(in_flags)
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not text"
        raise ConfigError(f"{flag}-file {path} cannot be read: {reason}") from error
    in_file = []
    for number, line in enumerate(lines, 1):
        if line and not line.startswith("#"):
            where = f"{flag}-file {path}, line {number}"
            key, *fields = line.split()
            in_file.append(_api_key(key, _caller(fields, where), where))
    if not in_file:
        raise ConfigError(f"{flag}-file {path} contains no key: it needs one per line")
    return (*in_flags, *in_file)


def check_classes(keys: Sequence[ApiKey], known: Collection[str]) -> None:
    """Checks that the service classes of keys exist.

    Raises:
        ConfigError: names the file, the line and the class.
    """
    for key in keys:
        for name in key.caller.classes:
            if not known:
                raise ConfigError(f"{key.where}: class={name} needs --service-classes, which defines the classes")
            if name not in known:
                raise ConfigError(f"{key.where}: class {name!r} is not in --service-classes; it has {', '.join(known)}")


def _api_key(text: str, caller: Caller, where: str) -> ApiKey:
    _check(text, where)
    if not caller.tenant:
        caller = Caller("key-" + _digest(b"tenant " + text.encode()).hex()[:_TENANT_DIGITS], caller.classes)
    return ApiKey(text, caller, where)


def _caller(fields: Sequence[str], where: str) -> Caller:
    """Returns what the fields behind a key say."""
    values: dict[str, str] = {}
    for field in fields:
        name, equals, value = field.partition("=")
        if name not in ("class", "tenant") or not equals:
            raise ConfigError(f"{where}: behind the key are only class=NAME,... and tenant=NAME; a key has no spaces")
        if name in values:
            raise ConfigError(f"{where}: {name}= is there twice")
        values[name] = value
    tenant = values.get("tenant", "")
    if "tenant" in values and not is_tenant(tenant):
        raise ConfigError(f"{where}: tenant= must have 1 to {MAX_TENANT_BYTES} printable ASCII characters")
    classes = tuple(values["class"].split(",")) if "class" in values else ()
    if not all(classes):
        raise ConfigError(f"{where}: class= has an empty name")
    return Caller(tenant, classes)


def _check(key: str, where: str) -> None:
    if not (0 < len(key) <= MAX_KEY_CHARS and key.isascii() and key.isprintable() and " " not in key):
        raise ConfigError(f"{where}: a key has 1 to {MAX_KEY_CHARS} printable ASCII characters and no spaces")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
