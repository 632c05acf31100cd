"""A request's logits and tokens are the same bits alone and in batches, on CPUs older than this one too.

The promise's own tests run again in a process for each CPU, and beside them some that compare values; `make
test-portable` runs all numerical tests on more CPUs, and on other numbers of cores.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hang import START_HANG_S
from tests.portability.machines import MACHINES

ROOT = Path(__file__).parents[2]
PROMISE = [
    *(
        "tests/engine/runner/test_batch_invariance.py::test_logits_and_tokens_are_the_same_bits_as_alone"
        f"[GQA 3, biases, long rows in {mode}-{scenario}]"
        for mode in ("fp32", "int8 all")
        for scenario in ("batched", "preempted, prefix-cached, budget of 33", "two threads, budget of 64")
    ),
    "tests/kernels/cpu/test_linear.py::test_a_row_has_the_same_bits_among_any_number_of_rows",
    "tests/kernels/cpu/test_linear.py::test_weights_of_two_bytes_give_the_bits_of_their_fp32_values",
    "tests/kernels/cpu/test_grouped_linear.py::test_products_have_the_bits_of_the_dequantised_weights",
    "tests/kernels/cpu/test_multiply_tile.py",
    "tests/kernels/cpu/test_two_bytes.py",
    "tests/kernels/cpu/test_linear.py::test_products_are_those_of_fp64",
    "tests/kernels/cpu/test_paged_attention.py::test_paged_attention_equals_reference_on_random_batches",
    "tests/kernels/cpu/test_rotate_and_store.py",
]


@pytest.mark.slow
@pytest.mark.timeout(2 * START_HANG_S)
@pytest.mark.parametrize("name", ["haswell", "skylake-avx512"])  # the suite itself has tried this one
def test_promises_hold_on(name):
    machine = MACHINES[name]
    if machine.missing:
        pytest.skip(f"needs {', '.join(sorted(machine.missing))}")
    # A plain run, without the options that started this one.
    environment = {variable: value for variable, value in os.environ.items() if not variable.startswith("PYTEST")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header", *PROMISE]
    result = subprocess.run(
        command, cwd=ROOT, env=environment | machine.variables, capture_output=True, text=True, timeout=START_HANG_S
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert " passed" in result.stdout
