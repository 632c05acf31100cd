import json
from dataclasses import replace
from pathlib import Path

import pytest

from loadgen.errors import ResultError
from loadgen.run.ceiling import Ceiling, store_ceiling, stored_ceiling, this_host


def ceiling(protocol: str = "grpc") -> Ceiling:
    host, cpus, python = this_host()
    return Ceiling(
        protocol=protocol,
        messages_per_s=30_000.0,
        messages_per_s_per_worker=18_000.0,
        num_workers=2,
        null_messages_per_s=200_000.0,
        ttft_error_ms=0.5,
        itl_error_ms=0.1,
        tpot_error_ms=0.1,
        host=host,
        num_cpus=cpus,
        python=python,
        found_at="2026-01-01T00:00:00+00:00",
    )


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "chairlift" / "loadgen-ceiling.json"


def test_a_ceiling_is_found_again_for_its_protocol(cache: Path) -> None:
    assert stored_ceiling() is None
    assert store_ceiling(ceiling()) == cache
    store_ceiling(ceiling("http"))
    store_ceiling(replace(ceiling("http"), messages_per_s=1.0))
    assert stored_ceiling() == stored_ceiling("grpc") == ceiling()
    assert stored_ceiling("chat") == stored_ceiling("completions") == replace(ceiling("http"), messages_per_s=1.0)
    assert stored_ceiling("null") is None


@pytest.mark.parametrize("change", [{"host": "another"}, {"num_cpus": 10_000}, {"python": "2.7"}])
def test_another_hosts_ceiling_is_not_ours(change: dict[str, object]) -> None:
    store_ceiling(replace(ceiling(), **change))  # type: ignore[arg-type]
    assert stored_ceiling() is None


@pytest.mark.parametrize("text", ["", "[]", "{", '{"grpc": 7}', '{"grpc": {"messages": 1}}'])
def test_an_unreadable_file_counts_as_none_and_is_replaced(cache: Path, text: str) -> None:
    cache.parent.mkdir(parents=True)
    cache.write_text(text)
    assert stored_ceiling() is None
    store_ceiling(ceiling())
    assert set(json.loads(cache.read_text())) == {"grpc"}


def test_a_folder_that_cannot_be_written_is_named(cache: Path) -> None:
    cache.parent.parent.write_text("a file, not a folder")
    with pytest.raises(ResultError, match="chairlift"):
        store_ceiling(ceiling())


def test_more_workers_take_as_many_more() -> None:
    assert [ceiling().of(count) for count in (1, 2, 4)] == [15_000, 30_000, 60_000]
    assert replace(ceiling(), messages_per_s=50_000.0).of(1) == 18_000
