"""Divides the layers of a model with sliding windows into the groups of the KV cache."""

from collections.abc import Sequence
from itertools import count
from typing import NamedTuple

from engine.core.cache_groups import ONE_GROUP, CacheGroups
from engine.model.model_shape import LayerShape

# A block has room for all layers of the largest group. What smaller groups leave of it is lost, also to requests that
# are shorter than the window and gain nothing.
_MOST_ROOM = 1.2
_MAX_GROUPS = 16


class LayerGroups(NamedTuple):
    """The groups of the cache, and that of each layer."""

    cache_groups: CacheGroups
    of_layers: tuple[int, ...]


def group_layers(layers: Sequence[LayerShape], windows: Sequence[int | None]) -> LayerGroups:
    """Returns groups of about equal size: one of the layers without a window, and several of those with one.

    Groups are as small as possible. Layers with a window are dealt out in turn, so that a pipeline stage has about
    as many layers of each group; those with a smaller window than others keep as many tokens as these.

    Args:
        layers: of the model; groups share memory only if all have the same heads.
        windows: of these layers.
    Returns: one group if nothing has a window, if layers differ, or if groups would be of too different sizes.
    """
    one = LayerGroups(ONE_GROUP, (0,) * len(layers))
    windowed = [window for window in windows if window is not None]
    if not windowed or len({layer._replace(num_heads=0, group=0) for layer in layers}) > 1:
        return one
    num_plain = len(windows) - len(windowed)
    if not num_plain:
        return LayerGroups(CacheGroups(0, 1, max(windowed)), one.of_layers)
    sizes = [  # of the largest group, with the number of groups with a window
        (max(num_plain, -(-len(windowed) // num_groups)), num_groups)
        for num_groups in range(1, min(_MAX_GROUPS, len(windowed) + 1))
    ]
    sizes = [(size, num_groups) for size, num_groups in sizes if size * (1 + num_groups) <= _MOST_ROOM * len(layers)]
    if not sizes:
        return one
    _, num_windowed = min(sizes)  # a long request takes most blocks for the layers without a window
    turns = count()
    of_layers = tuple(0 if window is None else 1 + next(turns) % num_windowed for window in windows)
    return LayerGroups(CacheGroups(1, num_windowed, max(windowed)), of_layers)
