"""What LoRA adapters change of linear layers, and the interface of models whose layers they change."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TypeAlias

import torch

from kernels.interface import AdapterOps, Adapters, LinearInput, LowRank, pack_adapters
from kernels.metadata import AdaptedTokens

ChangeOf: TypeAlias = Callable[[str], LowRank | None]
"""Returns what an adapter changes of a projection, by its name in the checkpoint; None: nothing."""


class LinearAdapters:
    """The adapters of one linear layer, whose matrix has the rows of its projections one below the other.

    One rank has all rows and columns.
    """

    def __init__(self, in_features: int, rows: Mapping[str, slice], row_order: torch.Tensor | None = None) -> None:
        """Has no adapters yet.

        Args:
            in_features: columns.
            rows: rows of each projection, by its name in the checkpoint, ascending.
            row_order: [rows] int64, rows in memory from those rows; None: the same.
        """
        self._in_features = in_features
        self._rows = rows
        self._row_order = row_order
        self._packed: tuple[AdapterOps, Adapters] | None = None

    def projection_shapes(self) -> dict[str, tuple[int, int]]:
        """Returns rows and columns of each projection, by its name in the checkpoint."""
        return {name: (rows.stop - rows.start, self._in_features) for name, rows in self._rows.items()}

    def pack(self, ops: AdapterOps, adapters: Sequence[ChangeOf]) -> None:
        """Packs what each adapter changes."""
        changes = [self._changes(change_of) for change_of in adapters]
        if any(changes):
            self._packed = ops, pack_adapters(ops, changes)

    def reserve(self, ops: AdapterOps, num_adapters: int, max_rank: int) -> None:
        """Allocates adapters that `replace` fills."""
        rows = [(rows.start, rows.stop) for rows in self._rows.values()]
        self._packed = ops, ops.reserve_adapters(num_adapters, max_rank, self._in_features, rows)

    def replace(self, ops: AdapterOps, index: int, change_of: ChangeOf) -> None:
        """Replaces what one of the reserved adapters changes; no step may use it meanwhile."""
        assert self._packed is not None, "adapters are reserved first"
        ops.set_adapter(self._packed[1], index, self._changes(change_of))

    def add(self, y: torch.Tensor, x: LinearInput, tokens: AdaptedTokens) -> None:
        """Adds the changes of these tokens to y [T, rows], the results of inputs x [T, columns], in place."""
        if self._packed is not None:
            ops, adapters = self._packed
            ops.add_adapters(y, x, adapters, tokens)

    def _changes(self, change_of: ChangeOf) -> list[LowRank]:
        """Returns what an adapter changes of the matrix."""
        changes = [(change_of(name), rows) for name, rows in self._rows.items()]
        return [
            LowRank(change.a, self._in_order(change.b, rows), rows.start)
            for change, rows in changes
            if change is not None
        ]

    def _in_order(self, rows: torch.Tensor, below: slice) -> torch.Tensor:
        """Returns rows of a projection in their order in memory, which exchanges none with other projections."""
        if self._row_order is None:
            return rows
        order = self._row_order[below] - below.start
        assert 0 <= int(order.min()) <= int(order.max()) < len(rows), "rows of different projections are exchanged"
        return rows[order]


class AdaptableModel(ABC):
    """A model, on one rank, of whose linear layers adapters can change some."""

    @abstractmethod
    def adaptable(self) -> Iterable[LinearAdapters]:
        """Returns the adapters of each linear layer that they can change."""

    def projection_shapes(self) -> dict[str, tuple[int, int]]:
        """Returns rows and columns of all linear layers that adapters can change, by their names in the checkpoint."""
        return {name: shape for layer in self.adaptable() for name, shape in layer.projection_shapes().items()}

    def set_adapters(self, ops: AdapterOps, adapters: Sequence[Mapping[str, LowRank]]) -> None:
        """Adds adapters, which steps then select by their index; each maps names of linear layers to changes."""
        for layer in self.adaptable():
            layer.pack(ops, [changes.get for changes in adapters])

    def reserve_adapters(self, ops: AdapterOps, num_adapters: int, max_rank: int) -> None:
        """Allocates adapters of at most a rank, which change nothing until `set_adapter`."""
        for layer in self.adaptable():
            layer.reserve(ops, num_adapters, max_rank)

    def set_adapter(self, ops: AdapterOps, index: int, change_of: ChangeOf) -> None:
        """Replaces one of the reserved adapters, a layer at a time.

        It may be called on any thread, while steps run that do not use this adapter.
        """
        for layer in self.adaptable():
            layer.replace(ops, index, change_of)
