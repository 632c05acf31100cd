"""Commands of each stage of the check on a GPU."""

from pathlib import Path

import pytest

from engine.bench.gpu.stages import FIRST_CONTACT, STAGES, Rehearsal, commands_of


@pytest.mark.parametrize("stage", [*STAGES, FIRST_CONTACT])
def test_every_stage_has_commands_with_a_share_of_the_time(stage: str) -> None:
    commands = commands_of(stage, Rehearsal(), (), num_processes=8, seed=7)
    assert commands
    assert all(0 < command.share <= 1 for command in commands)
    assert commands[-1].share == 1


def test_tests_run_with_pytest_and_its_timeout_alone() -> None:
    tests, bench = commands_of("kernels", Rehearsal(), (), num_processes=8, seed=7)
    assert tests.arguments[:4] == ("-m", "pytest", "-c", "/dev/null")
    assert not any("asyncio" in argument for argument in tests.arguments)
    assert {"tests/kernels/gpu", "tests/engine/test_gpu_serving.py"} <= set(tests.arguments)
    assert dict(tests.environ) == {
        "CHAIRLIFT_TEST_SEED": "7",
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        "TRITON_INTERPRET": "",
    }
    assert tests.full_arguments(Path("x"), 100) == list(tests.arguments)
    assert bench.arguments == ("-m", "kernels.bench", "--device", "cuda")
    (alone, _) = commands_of("kernels", Rehearsal(), (), num_processes=1, seed=7)
    assert set(tests.arguments) - set(alone.arguments) == {"xdist.plugin", "-n", "8"}


def test_decode_runs_both_precisions_by_default() -> None:
    titles = [command.title for command in commands_of("decode", Rehearsal(), (), num_processes=1, seed=0)]
    assert titles == ["gpu-decode, bf16", "gpu-decode, fp8"]
    (only,) = commands_of("decode", Rehearsal(), ("--precision", "fp8"), num_processes=1, seed=0)
    assert only.arguments[-2:] == ("--precision", "fp8")


def test_first_contact_has_a_little_of_everything() -> None:
    commands = commands_of(FIRST_CONTACT, Rehearsal(), (), num_processes=8, seed=7)
    assert [command.title for command in commands] == [
        *("versions", "tests"),
        *("gpu-judge, eager", "gpu-judge, graphs", "gpu-judge, in-flight", "gpu-judge, alone", "gpu-decode"),
    ]
    assert commands[2].arguments[-4:] == ("--shape", "0.6B", "--mode", "eager")
    assert commands[-1].arguments[-4:] == ("--batches", "64", "--contexts", "512")


def test_command_gets_a_journal_and_a_smaller_budget() -> None:
    rehearsal = Rehearsal("cpu", "tiny", quick=True, threads=2)
    (command,) = commands_of("mix", rehearsal, ("--slots", "2"), num_processes=1, seed=0)
    assert command.full_arguments(Path("a/1.jsonl"), 100.0) == [
        *("-m", "engine.bench", "gpu-mix", "--device", "cpu", "--threads", "2", "--shape", "tiny", "--quick"),
        *("--slots", "2", "--journal", "a/1.jsonl", "--budget", "85", "--out", "a/1.out"),
    ]
