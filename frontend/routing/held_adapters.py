"""The adapters that one attached engine has, as it last reported them."""

from chairlift.engine.v1 import engine_service_pb2 as pb
from frontend.text.served_model import Adapter


class HeldAdapters:
    """Adapters by name; changed by the engine's reports.

    Args:
        adapters: those of its info.
        status: of its welcome.

    Attributes:
        by_name: name to adapter, in the engine's order.
        can_change: whether the engine loads and unloads adapters.
    """

    def __init__(self, adapters: list[pb.Adapter], status: pb.EngineStatus) -> None:
        self.by_name = _by_name(adapters)
        self.can_change = status.HasField("adapters")
        self._revision = status.adapters.revision

    def update(self, reported: pb.AdapterList) -> bool:
        """Takes a report, unless it is older than the last one; returns whether something has changed."""
        if reported.revision <= self._revision:
            return False
        self._revision = reported.revision
        before, self.by_name = self.by_name, _by_name(list(reported.adapters))
        return self.by_name != before

    def has(self, name: str, sha256: bytes) -> bool:
        """Whether the engine has this adapter."""
        held = self.by_name.get(name)
        return held is not None and held.sha256 == sha256


def _by_name(adapters: list[pb.Adapter]) -> dict[str, Adapter]:
    return {adapter.name: Adapter(adapter.name, adapter.sha256, adapter.path) for adapter in adapters}
