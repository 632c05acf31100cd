"""Finds the benchmarks: every module of this package that has a `BENCHMARK`."""

import importlib
import pkgutil

import engine.bench
from chairlift.bench.benchmark import Benchmark


def find_benchmarks() -> list[Benchmark]:
    """All benchmarks, by id, the letters in order and then the numbers."""
    found = []
    for module_info in pkgutil.iter_modules(engine.bench.__path__):
        if module_info.name == "__main__":
            continue
        module = importlib.import_module(f"{engine.bench.__name__}.{module_info.name}")
        benchmark = vars(module).get("BENCHMARK")
        if isinstance(benchmark, Benchmark):
            found.append(benchmark)
    return sorted(found, key=_order)


def _order(benchmark: Benchmark) -> tuple[str, int, str]:
    """Numbered ids first, by letter and number; then by name."""
    if not benchmark.ids:
        return ("~", 0, benchmark.name)
    first = benchmark.ids[0]
    return (first[0], int("".join(filter(str.isdigit, first))), benchmark.name)
