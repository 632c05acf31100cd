"""Whole models on GPUs that are not there: the start-up compiles every kernel that serving will launch."""

import os
import subprocess
import sys

import pytest

FIND = "tests.support.engine.compiles"


def run(*command):
    """In a process of its own, with Triton's interpreter off."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    return subprocess.run([sys.executable, *command], env=environment, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("target", "options"),
    [
        ("sm_90", ["--model", "llama-3.1-8b"]),
        *(
            pytest.param(target, options.split(), marks=pytest.mark.slow)
            for target, options in (
                ("sm_90", "--model qwen3-4b --fp8 --block-size 64"),
                ("sm_90", "--model qwen2.5-7b --sliding-window 64"),
                ("sm_80", "--model qwen3-0.6b"),
                ("sm_90", "--model qwen2.5-7b --batch-invariant"),
                ("sm_90", "--model qwen3-4b --block-scales"),
                ("sm_80", "--model qwen3-4b --block-scales"),
                ("sm_100", "--model llama-3.2-1b --fp8"),
                ("gfx942", "--model mistral-7b-v0.3 --fp8"),
            )
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_serving_compiles_nothing(target, options):
    """The first run on a machine compiles some 20 kernels; Triton keeps them for the next."""
    result = run("-m", FIND, "--target", target, *options)
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_a_specialization_missing_at_start_up_is_detected():
    """Decode rows, and a sampler with biases."""
    result = run(
        "-c",
        """
import sys
from kernels.gpu import paged_attention, sample
from tests.support.engine.compiles import main

sample._every_form = lambda batch: iter(())
decode_attention = paged_attention.decode_attention
def not_at_start_up(*args, **options):
    if not paged_attention.is_compile_only():
        decode_attention(*args, **options)
paged_attention.decode_attention = not_at_start_up
sys.exit(main([]))
""",
    )
    assert result.returncode == 1
    late = {line.removeprefix("compiled late: ").split("[")[0] for line in result.stderr.splitlines()}
    assert {"_merge_chunks_kernel", "_decode_attention_kernel", "_add_biases_kernel"} <= late
    assert "_prefill_attention_kernel" not in late
