"""Finds the benchmarks: every module of this package that has a `BENCHMARK`."""

import importlib
import pkgutil

import engine.bench
from engine.bench.benchmark import Benchmark


def find_benchmarks() -> list[Benchmark]:
    """All benchmarks, by id, with the numbers in the ids in order."""
    found = []
    for module_info in pkgutil.iter_modules(engine.bench.__path__):
        if module_info.name == "__main__":
            continue
        module = importlib.import_module(f"{engine.bench.__name__}.{module_info.name}")
        benchmark = vars(module).get("BENCHMARK")
        if isinstance(benchmark, Benchmark):
            found.append(benchmark)
    return sorted(found, key=_order)


def _order(benchmark: Benchmark) -> tuple[int, str]:
    """Numbered ids first, by number; then by name."""
    digits = "".join(filter(str.isdigit, benchmark.ids[0])) if benchmark.ids else ""
    return (int(digits) if digits else 10**6, benchmark.name)
