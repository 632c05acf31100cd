import pytest

from chairlift.service.service_classes import ServiceClass
from loadgen.errors import OptionError
from loadgen.service_mix import ServiceMix, recorded_classes
from loadgen.simulation.workload import requests_of
from loadgen.synthetic import choice, random_requests

CLASSES = {name: ServiceClass(name=name, ttft_s=seconds) for name, seconds in (("a", 1.0), ("b", None), ("c", 2.0))}


def test_requests_get_classes_by_weight() -> None:
    drawn = ServiceMix(classes=CLASSES, weights={"a": 3.0, "c": 1.0}).draw(4000, seed=1)
    assert set(drawn.tolist()) == {0, 2}
    assert 2850 < (drawn == 0).sum() < 3150


def test_the_twin_draws_the_same_classes() -> None:
    trace = random_requests(50, choice(8), choice(8))
    weights = {"a": 1.0, "b": 2.0, "c": 1.0}
    drawn = ServiceMix(classes=CLASSES, weights=weights).draw(50, seed=7)
    names = list(CLASSES)
    assert [one.service_class.name for one in requests_of(trace, CLASSES, weights, 7)] == [names[i] for i in drawn]
    assert drawn.tolist() != ServiceMix(classes=CLASSES, weights=weights).draw(50, seed=8).tolist()


@pytest.mark.parametrize(
    ("weights", "message"), [({"x": 1.0}, "class 'x'; the file has a, b, c"), ({"a": 0.0}, "no class a share")]
)
def test_weights_are_checked(weights: dict[str, float], message: str) -> None:
    with pytest.raises(OptionError, match=message):
        ServiceMix(classes=CLASSES, weights=weights)


def test_a_run_keeps_its_classes() -> None:
    saved = ServiceMix(classes=CLASSES).as_json()
    assert recorded_classes({"service_classes": saved}) == tuple(CLASSES.values())
    assert recorded_classes({"service_classes": None}) == ()
