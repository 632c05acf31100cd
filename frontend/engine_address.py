"""Addresses of engines: which protocol an engine speaks, and where it listens. Pure."""

from enum import StrEnum
from typing import NamedTuple

_SEPARATOR = "://"


class EngineKind(StrEnum):
    """What an engine serves. The value is the scheme of its address."""

    CHAIRLIFT = ""
    """`chairlift.engine.v1`; its addresses have no scheme."""
    VLLM = "vllm"
    """`vllm.grpc.engine.VllmEngine`."""
    SGLANG = "sglang"
    """`sglang.grpc.scheduler.SglangScheduler`."""
    TRTLLM = "trtllm"
    """`trtllm.TrtllmService`."""


class EngineAddress(NamedTuple):
    """An address in parts.

    Attributes:
        kind: what the engine serves.
        target: HOST:PORT, dns:HOST:PORT or unix:PATH.
    """

    kind: EngineKind
    target: str

    @classmethod
    def parse(cls, address: str) -> "EngineAddress":
        """Splits an address.

        Raises:
            ValueError: its scheme is not known, or it has two.
        """
        scheme, separator, target = address.partition(_SEPARATOR)
        if _SEPARATOR in target:
            raise ValueError(f"{address} has two schemes")
        return cls(EngineKind(scheme), target) if separator else cls(EngineKind.CHAIRLIFT, address)

    def at(self, target: str) -> str:
        """Returns the address of an engine of the same kind elsewhere."""
        return f"{self.kind}{_SEPARATOR}{target}" if self.kind else target
