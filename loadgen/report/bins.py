"""Bins wide enough to say something: neighbours are laid together until each holds enough samples. Pure."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


class Bin(NamedTuple):
    """What lies from `low` up to `high`; the last bin holds its upper edge too.

    Attributes:
        low, high: its edges.
        members: [samples] int64, indexes of what lies in it.
    """

    low: float
    high: float
    members: "NDArray[np.int64]"


def full_bins(places: "NDArray[np.float64]", edges: "Sequence[float] | NDArray[np.float64]", least: int) -> list[Bin]:
    """Lays neighbouring bins together until each holds at least `least` samples; what is left joins the last one.

    Args:
        places: [samples] float64; those outside the edges are in no bin.
        edges: ascending, of the narrowest bins there can be.
        least: samples of a bin, at least 1.
    Returns: bins side by side over all edges, in order; none where there are fewer than `least` samples in all.
    """
    edges = np.asarray(edges, dtype=np.float64)
    inside = np.flatnonzero((places >= edges[0]) & (places <= edges[-1]))
    own = np.minimum(np.searchsorted(edges, places[inside], side="right") - 1, len(edges) - 2)
    found: list[Bin] = []
    first, held = 0, 0
    for index, count in enumerate(np.bincount(own, minlength=len(edges) - 1).tolist()):
        held += count
        if held >= least:
            found.append(Bin(float(edges[first]), float(edges[index + 1]), inside[(own >= first) & (own <= index)]))
            first, held = index + 1, 0
    if found and first < len(edges) - 1:
        low, _, members = found.pop()
        found.append(Bin(low, float(edges[-1]), np.sort(np.concatenate((members, inside[own >= first])))))
    return found
