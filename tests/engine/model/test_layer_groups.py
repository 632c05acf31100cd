"""Layers with sliding windows are divided into groups of about equal size."""

from collections import Counter

import pytest

from engine.core.cache_groups import ONE_GROUP, CacheGroups
from engine.model.layer_groups import group_layers
from engine.model.model_shape import LayerShape

HEADS = LayerShape(8, 4, 128)


def windows(num_layers: int, every: int, window: int = 1024) -> list[int | None]:
    """All layers have a window except every `every`-th one."""
    return [None if index % every == every - 1 else window for index in range(num_layers)]


@pytest.mark.parametrize(
    ("num_layers", "every", "num_windowed", "size"),
    [
        (26, 6, 6, 4),  # Gemma 3 1B
        (34, 6, 6, 5),  # Gemma 3 4B
        (48, 6, 5, 8),  # Gemma 3 12B
        (62, 6, 6, 10),  # Gemma 3 27B
        (24, 2, 1, 12),  # gpt-oss 20B
        (36, 2, 1, 18),  # gpt-oss 120B
        (42, 2, 1, 21),  # Gemma 2 9B
        (32, 4, 3, 8),  # OLMo 3 7B
    ],
)
def test_groups_of_models_waste_little(num_layers: int, every: int, num_windowed: int, size: int) -> None:
    groups = group_layers([HEADS] * num_layers, windows(num_layers, every))
    assert groups.cache_groups == CacheGroups(1, num_windowed, 1024)
    sizes = Counter(groups.of_layers)
    assert len(sizes) == 1 + num_windowed
    assert max(sizes.values()) == size
    assert size * (1 + num_windowed) <= 1.13 * num_layers
    assert [group == 0 for group in groups.of_layers] == [window is None for window in windows(num_layers, every)]


def test_each_part_of_the_layers_has_about_as_many_of_each_group() -> None:
    of_layers = group_layers([HEADS] * 48, windows(48, 6)).of_layers
    for stage in (of_layers[:24], of_layers[24:]):
        assert set(Counter(stage).values()) == {4}


def test_without_windows_or_with_a_window_everywhere_there_is_one_group() -> None:
    assert group_layers([HEADS] * 3, [None] * 3) == (ONE_GROUP, (0, 0, 0))
    assert group_layers([HEADS] * 3, [64, 32, 64]) == (CacheGroups(0, 1, 64), (0, 0, 0))


def test_the_largest_window_counts() -> None:
    assert group_layers([HEADS] * 4, [None, 32, None, 64]).cache_groups.window == 64


def test_layers_that_do_not_fit_together_stay_in_one_group() -> None:
    wide = HEADS._replace(head_dim=256)
    assert group_layers([HEADS, wide], [64, None]).cache_groups is ONE_GROUP
    few = [None] * 7 + [64] * 3  # two groups of 7 would take 14 layers' memory for a short request
    assert group_layers([HEADS] * 10, few).cache_groups is ONE_GROUP
