"""Description and rates of the machine."""

from importlib import metadata
from pathlib import Path

import torch

from engine.bench.cpu_floors import measure_floors
from engine.bench.machine import Machine


def test_relevant_cpu_flags_are_kept(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(
        "processor\t: 0\nmodel name\t: Some CPU 3\nflags\t\t: fpu avx2 sse avx512_vnni\n\nprocessor\t: 1\n"
    )
    machine = Machine.here(cpuinfo)
    assert machine.cpu == "Some CPU 3"
    assert machine.cpu_flags == ("avx2", "avx512_vnni")
    assert machine.usable_cpus >= 1
    assert machine.versions["torch"] == metadata.version("torch")


def test_machine_without_cpuinfo_has_a_name(tmp_path: Path) -> None:
    machine = Machine.here(tmp_path / "none")
    assert machine.cpu
    assert machine.cpu_flags == ()


def test_floors_are_the_best_of_all_products() -> None:
    floors = measure_floors(1, quick=True)
    assert floors.threads == torch.get_num_threads() == 1
    assert floors.read_bytes_per_s > 0
    rates = floors.matrix_products
    assert floors.fp32_flops == max(rate for name, rate in rates.items() if name.startswith("fp32"))
    assert floors.int8_ops == max(rate for name, rate in rates.items() if name.startswith("int8"))
    assert floors.as_json()["matrix_products"] == rates
    assert "GFLOP/s" in str(floors)
