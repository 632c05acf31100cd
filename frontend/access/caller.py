"""Who makes a call, as far as its API key and a trusted gateway say: tenant and service classes.

The API layer sets the caller in a context variable of the task that serves the call; the request's conversion reads it.
"""

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace

from chairlift.service.engine_protocol import MAX_TENANT_BYTES
from frontend.errors import InvalidRequest

TENANT_HEADER = "x-gateway-inference-fairness-id"


@dataclass(frozen=True, slots=True)
class Caller:
    """The caller of one call.

    Attributes:
        tenant: who is charged; empty: unknown.
        classes: names of the service classes that its requests may have, the first one by default; empty: any.
    """

    tenant: str = ""
    classes: tuple[str, ...] = ()


ANYBODY = Caller()
_caller: ContextVar[Caller] = ContextVar("caller", default=ANYBODY)


def current_caller() -> Caller:
    """Returns the caller of the call that the current task serves."""
    return _caller.get()


def note_caller(caller: Caller, tenants: Sequence[str | bytes] = ()) -> None:
    """Sets the caller of the current task.

    Args:
        caller: as its API key says.
        tenants: all values of TENANT_HEADER, if it is trusted: one replaces the key's tenant.

    Raises:
        InvalidRequest: more than one tenant, or a name that is not a tenant's.
    """
    if tenants:
        if len(tenants) > 1:
            raise InvalidRequest(f"{TENANT_HEADER} is sent {len(tenants)} times, at most once is allowed")
        name = tenants[0] if isinstance(tenants[0], str) else tenants[0].decode("latin-1")
        if not is_tenant(name):
            raise InvalidRequest(f"{TENANT_HEADER} must have 1 to {MAX_TENANT_BYTES} printable ASCII characters")
        caller = replace(caller, tenant=name)
    _caller.set(caller)  # also an anonymous one: the context may still hold an earlier call's


def is_tenant(name: str) -> bool:
    """Whether a text can be the name of a tenant."""
    return 0 < len(name) <= MAX_TENANT_BYTES and name.isascii() and name.isprintable()
