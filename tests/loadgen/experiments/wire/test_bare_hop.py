from pathlib import Path

from loadgen.experiments.wire.bare_hop import BareHop


def test_every_message_takes_some_time(tmp_path: Path) -> None:
    with BareHop(tmp_path, period_s=0.001) as hop:
        for _ in range(2):
            latencies_ms = hop.latencies_ms(5)
            assert len(latencies_ms) == 5
            assert all(latency_ms > 0 for latency_ms in latencies_ms)
    assert hop._process.exit_status is not None


def test_messages_cost_the_server_something(tmp_path: Path) -> None:
    with BareHop(tmp_path, period_s=0.0) as hop:
        assert 0 < hop.cpu_s_per_message(num_streams=3, num_messages=20) < 1
