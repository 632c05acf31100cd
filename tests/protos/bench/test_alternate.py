"""Systems take turns, and ratios say how far to trust them."""

from collections.abc import Callable

import pytest

from chairlift.bench.alternate import Samples, alternate


def test_systems_take_turns_and_warm_up_rounds_do_not_count() -> None:
    order: list[str] = []
    values = iter(range(100))

    def system(name: str) -> Callable[[], float]:
        def measure() -> float:
            order.append(name)
            return float(next(values))

        return measure

    told: list[str] = []
    samples = alternate({"a": system("a"), "b": system("b")}, rounds=3, warm_up=2, progress=told.append)
    assert "".join(order) == "ababababab"
    assert samples.raw == {"a": (4.0, 6.0, 8.0), "b": (5.0, 7.0, 9.0)}
    assert told[0] == "warm-up: a 0"
    assert told[-1] == "round 3 of 3: b 9"


def test_figures_of_samples() -> None:
    samples = Samples({"slow": (8.0, 6.0, 10.0), "fast": (2.0, 3.0, 2.5)})
    assert samples.best("slow") == 6.0
    assert samples.median("slow") == 8.0
    ratio = samples.ratio("slow", "fast")
    assert ratio == (3.0, 2.0, 4.0)
    assert str(ratio) == "3.00 (2.00..4.00)"


@pytest.mark.parametrize("rounds", [0, -1])
def test_at_least_one_round(rounds: int) -> None:
    with pytest.raises(ValueError, match=f"rounds is {rounds}"):
        alternate({"a": lambda: 1.0}, rounds=rounds, progress=print)
