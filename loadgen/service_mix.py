"""Draws a service class for every request of a workload. Pure.

The twin (`loadgen.simulation`) and a real run draw alike: equal classes, weights and seed give equal requests.
"""

import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from chairlift.service.service_classes import ServiceClass
from loadgen.errors import OptionError

if TYPE_CHECKING:
    from numpy.typing import NDArray


def class_weights(classes: Mapping[str, ServiceClass], mix: Mapping[str, float]) -> list[float]:
    """Returns the weight of each class, in the order of the classes.

    Args:
        classes: by name, at least one.
        mix: weights by name, 0 for classes that are not in it; empty: all alike.

    Raises: OptionError: the mix names an unknown class or has no weight above 0.
    """
    for name in mix:
        if name not in classes:
            raise OptionError(f"--mix names class {name!r}; the file has {', '.join(classes)}")
    weights = [mix.get(name, 0.0) if mix else 1.0 for name in classes]
    if not sum(weights) > 0:
        raise OptionError(
            f"--mix {','.join(f'{name}={weight:g}' for name, weight in mix.items())} gives no class a share"
        )
    return weights


def draw_classes(weights: list[float], count: int, seed: int) -> "NDArray[np.int16]":
    """Returns [count] int16: the index of the class of each request."""
    drawn = random.Random(f"classes {seed}").choices(range(len(weights)), weights, k=count)
    return np.array(drawn, dtype=np.int16)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceMix:
    """Which targets the requests of a run have.

    Attributes:
        classes: by name, at least one.
        weights: of the classes by name; empty: all alike.
        sends_names: requests name their class, which the server knows; otherwise they carry its targets.

    Raises: OptionError: see `class_weights`.
    """

    classes: Mapping[str, ServiceClass]
    weights: Mapping[str, float] = field(default_factory=dict)
    sends_names: bool = True

    def __post_init__(self) -> None:
        class_weights(self.classes, self.weights)

    def draw(self, count: int, seed: int) -> "NDArray[np.int16]":
        """Returns [count] int16: the index of the class of each request."""
        return draw_classes(class_weights(self.classes, self.weights), count, seed)

    def as_json(self) -> list[dict[str, Any]]:
        """For `RunData.settings["service_classes"]`: the class of a request counts into it."""
        return [asdict(one) for one in self.classes.values()]


def recorded_classes(settings: Mapping[str, Any]) -> tuple[ServiceClass, ...]:
    """Returns the classes of a run from its settings; empty: its requests had none."""
    return tuple(ServiceClass(**saved) for saved in settings.get("service_classes") or ())
