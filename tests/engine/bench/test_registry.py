"""Every benchmark can be found, by its name and by the ids of its goals."""

import sys

from engine.bench.registry import find_benchmarks


def test_names_and_ids_are_used_once() -> None:
    benchmarks = find_benchmarks()
    names = [name for benchmark in benchmarks for name in (benchmark.name, *benchmark.ids)]
    assert len(names) == len(set(names))
    assert "list" not in names


def test_they_come_in_the_order_of_their_numbers() -> None:
    ids = [benchmark.ids[0] for benchmark in find_benchmarks() if benchmark.ids]
    assert ids[0] == "C1"
    assert ids == sorted(ids, key=lambda benchmark_id: (benchmark_id[0], int(benchmark_id[1:])))


def test_each_says_what_it_claims_and_how() -> None:
    for benchmark in find_benchmarks():
        text = sys.modules[benchmark.run.__module__].__doc__ or ""
        for word in ("Claim", "Method"):
            assert f"{word}: " in text, f"{benchmark.name} has no {word} in its docstring"
        for benchmark_id in benchmark.ids:
            assert benchmark_id in text, f"{benchmark.name} does not say what {benchmark_id} is"
