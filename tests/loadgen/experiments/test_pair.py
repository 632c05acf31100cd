from pathlib import Path

import pytest

from chairlift.bench.benchmark import BenchmarkError
from chairlift.bench.workload import Workload, shared_prefix_workload
from engine.bench.null_engine import END_TOKEN_ID, VOCAB_SIZE
from engine.config import EngineConfig, parse_config
from loadgen.experiments.client import Client
from loadgen.experiments.pair import Pair, engine_flags

NULL_ENGINE = "engine.bench.null_engine"


def test_flags_say_the_configuration() -> None:
    config = EngineConfig(
        model="somewhere",
        load_format="dummy",
        max_num_seqs=7,
        enable_prefix_caching=False,
        shutdown_timeout_s=3.0,
        threads=2,
        quantization="int8",
    )
    assert parse_config(engine_flags(config), {}) == config
    assert engine_flags(EngineConfig(model="m")) == ["--model", "m"]


def test_pair_delivers_every_token(tmp_path: Path) -> None:
    workload = shared_prefix_workload(5, shared_len=0, own_len=4, output_len=20, vocab_size=VOCAB_SIZE - 1)
    with Pair(["--hold", "4"], tmp_path / "p", engine_module=NULL_ENGINE) as pair:
        delivery = pair.client.generate(workload)
        run = delivery.run
        assert [len(ids) for ids in run.output_ids] == [20] * 5
        assert END_TOKEN_ID not in {token_id for ids in run.output_ids for token_id in ids}
        assert 5 <= delivery.num_messages <= 5 * 5
        for times_s in run.token_times_s:
            assert list(times_s) == sorted(times_s)
            assert 0 < times_s[0] <= times_s[-1] <= run.wall_s
        assert pair.pids == {pair.engine.pid, pair.frontend.pid}
        assert pair.engine.cpu_s() > 0
        with pytest.raises(BenchmarkError, match=r"INVALID_ARGUMENT: .*vocab"):
            pair.generate(Workload(((10**6,),), (1,)))
    assert pair.engine.has_ended
    assert pair.frontend.has_ended


def test_engine_that_cannot_start_says_why(tmp_path: Path) -> None:
    with (
        pytest.raises(BenchmarkError, match=r"(?s)the engine ended while starting:.*/no/such/model"),
        Pair(["--model", "/no/such/model"], tmp_path / "p"),
    ):
        pass


def test_nobody_is_not_served() -> None:
    with Client("127.0.0.1:1") as client:
        assert not client.is_served()
