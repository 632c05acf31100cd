"""The slots of an engine's adapters: which one is in which, who uses it, and when it may be written again."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from engine.core.request import Adapter
from engine.errors import AdapterNotFound, InvalidRequest, NoFreeAdapterSlot


@dataclass(slots=True)
class LoadedAdapter:
    """An adapter in its slot.

    Attributes:
        adapter: index of the slot, and digest of the files.
        path: as it was given at run time; empty for those of the start.
        num_requests: open requests that use it.
        is_listed: whether new requests may use it; those of an unlisted one finish.
    """

    name: str
    adapter: Adapter
    path: str = ""
    num_requests: int = 0
    is_listed: bool = True


class AdapterSlots:
    """The adapters of one engine by name, in slots 0 to `num_slots` - 1.

    A slot is free, being loaded, taken, or being freed: no request uses it, but steps in flight may still read it.

    Attributes:
        revision: number of changes of the list.

    Invariants: a slot has at most one adapter; listed adapters have different names; an unlisted adapter without
    requests is being freed.
    """

    def __init__(self, num_slots: int, adapters: Iterable[tuple[str, bytes]] = ()) -> None:
        """Takes the adapters of the start, as names and digests, in slots from 0 on."""
        self._num_slots = num_slots
        self._by_name: dict[str, LoadedAdapter] = {}
        self._by_index: dict[int, LoadedAdapter] = {}
        self._loading: set[int] = set()
        self._freeing: set[int] = set()
        self.revision = 0
        for index, (name, digest) in enumerate(adapters):
            self._by_name[name] = self._by_index[index] = LoadedAdapter(name, Adapter(index, digest))
        assert len(self._by_index) <= num_slots, f"{len(self._by_index)} adapters need as many slots, not {num_slots}"

    def __iter__(self) -> Iterator[LoadedAdapter]:
        """Yields those that new requests may use, in the order in which they were loaded."""
        return iter(self._by_name.values())

    def find(self, name: str) -> LoadedAdapter | None:
        """Returns the adapter that new requests of this name use."""
        return self._by_name.get(name)

    def acquire(self, name: str, digest: bytes = b"") -> Adapter:
        """Returns an adapter for one more request, which `release` ends.

        Raises:
            AdapterNotFound: another digest was asked for than that of the adapter of this name, if there is one.
            InvalidRequest: no digest was asked for, and there is none of this name.
        """
        loaded = self._by_name.get(name)
        if loaded is None or digest not in (b"", loaded.adapter.digest):
            message = f"adapter is {name[:256]!r}, this engine has {len(self._by_name)} others"
            raise AdapterNotFound(message) if digest else InvalidRequest(message)
        loaded.num_requests += 1
        return loaded.adapter

    def release(self, adapter: Adapter) -> bool:
        """Ends the use by one request; returns whether the slot is now being freed: see `free`."""
        loaded = self._by_index[adapter.index]
        loaded.num_requests -= 1
        return self._free_unused(loaded)

    def reserve(self) -> int:
        """Returns a free slot to load an adapter to.

        Raises: NoFreeAdapterSlot: there is none.
        """
        for index in range(self._num_slots):
            if index not in self._by_index and index not in self._loading and index not in self._freeing:
                self._loading.add(index)
                return index
        unloaded = [loaded for loaded in self._by_index.values() if not loaded.is_listed]
        raise NoFreeAdapterSlot(
            f"--max-loras is {self._num_slots}: {len(self._by_name)} adapters are loaded, {len(self._loading)} are "
            f"being loaded, and {len(unloaded) + len(self._freeing)} were unloaded but are in use by "
            f"{sum(loaded.num_requests for loaded in unloaded)} requests"
        )

    def abandon(self, index: int) -> None:
        """Returns a reserved slot whose adapter could not be loaded."""
        self._loading.remove(index)

    def add(self, index: int, name: str, digest: bytes, path: str) -> bool:
        """Lists an adapter that was loaded to a reserved slot, instead of the one of its name.

        Returns: whether the slot of that one is now being freed.
        """
        is_freeing = name in self._by_name and self.remove(name)
        self._loading.remove(index)
        self._by_name[name] = self._by_index[index] = LoadedAdapter(name, Adapter(index, digest), path)
        self.revision += 1
        return is_freeing

    def remove(self, name: str) -> bool:
        """Unlists an adapter; its requests finish. Returns whether its slot is now being freed."""
        loaded = self._by_name.pop(name)
        loaded.is_listed = False
        self.revision += 1
        return self._free_unused(loaded)

    def free(self, indices: Iterable[int]) -> None:
        """Frees slots that were being freed: all steps that were in flight then have ended."""
        self._freeing.difference_update(indices)

    @property
    def freeing(self) -> frozenset[int]:
        """The slots that are being freed."""
        return frozenset(self._freeing)

    def _free_unused(self, loaded: LoadedAdapter) -> bool:
        if loaded.is_listed or loaded.num_requests:
            return False
        del self._by_index[loaded.adapter.index]
        self._freeing.add(loaded.adapter.index)
        return True

    def check_integrity(self) -> None:
        """Asserts the invariants of the class."""
        kinds = (set(self._by_index), self._loading, self._freeing)
        assert sum(map(len, kinds)) == len(set().union(*kinds)) <= self._num_slots, "a slot has two adapters"
        listed = [loaded for loaded in self._by_index.values() if loaded.is_listed]
        assert {id(loaded) for loaded in listed} == {id(loaded) for loaded in self._by_name.values()}
        assert all(loaded.is_listed or loaded.num_requests > 0 for loaded in self._by_index.values())
