import subprocess
import sys
from pathlib import Path

import pytest

from chairlift.bench.benchmark import BenchmarkError
from chairlift.bench.workload import Workload, shared_prefix_workload
from engine.bench.null_engine import END_TOKEN_ID, VOCAB_SIZE
from loadgen.errors import TargetError
from loadgen.experiments.client import Client
from loadgen.experiments.pair import Pair

NULL_ENGINE = "engine.bench.null_engine"


def test_pair_delivers_every_token(tmp_path: Path) -> None:
    workload = shared_prefix_workload(5, shared_len=0, own_len=4, output_len=20, vocab_size=VOCAB_SIZE - 1)
    with Pair(["--hold", "4"], tmp_path / "p", engine_module=NULL_ENGINE) as pair:
        pair.wait_until_served()
        assert pair.model.vocab_size == VOCAB_SIZE
        with Client(pair.address, pair.pids) as client:
            streams = client.streams(workload)
            assert [stream.num_tokens for stream in streams] == [20] * 5
            assert 5 <= sum(len(stream.counts) for stream in streams) <= 5 * 5
            run = client.generate(workload)
            assert [len(ids) for ids in run.output_ids] == [20] * 5
            assert END_TOKEN_ID not in {token_id for ids in run.output_ids for token_id in ids}
            for times_s in run.token_times_s:
                assert list(times_s) == sorted(times_s)
                assert 0 < times_s[0] <= times_s[-1] <= run.wall_s
            with pytest.raises(BenchmarkError, match=r"INVALID_ARGUMENT: .*vocab"):
                client.generate(Workload(((10**6,),), (1,)))
        assert pair.engine.cpu_s() > 0
    assert pair.engine.exit_status is not None
    assert pair.frontend.exit_status is not None


def test_engine_that_cannot_start_is_reported_with_its_last_lines(tmp_path: Path) -> None:
    with (
        pytest.raises(TargetError, match=r"(?s)engine ended with status \d+ while starting:.*/no/such/model"),
        Pair(["--model", "/no/such/model"], tmp_path / "p") as pair,
    ):
        pair.wait_until_served()


def test_command_that_cannot_start_a_pair_says_why(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "loadgen.experiments.pair", str(tmp_path / "p"), "--", "--no-such-flag"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no-such-flag" in done.stderr
