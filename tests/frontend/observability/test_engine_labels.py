"""Numbers of engines: any worker is scraped, so that all of them must mean the same engine by a number."""

import random

import pytest

from frontend.observability.engine_labels import EngineLabels


def test_single_process_gives_the_lowest_free_number():
    labels = EngineLabels(None)
    assert [labels.take(address) for address in "abc"] == ["0", "1", "2"]
    labels.free("1")
    assert [labels.take(address) for address in "de"] == ["1", "3"]


def test_worker_that_is_replaced_takes_the_numbers_of_the_others(tmp_path):
    old, other = EngineLabels(tmp_path), EngineLabels(tmp_path)
    for labels in (old, other):
        assert [labels.take(address) for address in ("x", "y")] == ["0", "1"]
        labels.free("0")
    assert [labels.take("z") for labels in (old, other)] == ["0", "0"]
    for label in ("0", "1"):  # its process has died, and with it its locks
        old.free(label)
    replacement = EngineLabels(tmp_path)  # it finds y and z, in the order of their addresses
    assert [replacement.take(address) for address in ("y", "z")] == ["1", "0"]


def test_number_is_free_only_when_no_worker_has_it(tmp_path):
    first, second = EngineLabels(tmp_path), EngineLabels(tmp_path)
    for labels in (first, second):
        labels.take("x")
    first.free("0")  # the second has not looked up the name since
    assert first.take("z") == "1"
    second.free("0")
    assert second.take("z") == "1"
    assert first.take("w") == second.take("w") == "0"


@pytest.mark.parametrize("seed", range(5))
def test_workers_agree_however_they_learn_of_changes(tmp_path, seed):
    rng = random.Random(seed)
    workers = [EngineLabels(tmp_path) for _ in range(3)]
    held = [{} for _ in workers]  # label by address
    addresses = [f"10.0.0.{number}:50052" for number in range(6)]
    for _ in range(300):
        index = rng.randrange(3)
        labels, own, address = workers[index], held[index], rng.choice(addresses)
        if address in own:
            labels.free(own.pop(address))
        else:
            own[address] = labels.take(address)
        if rng.random() < 0.02:  # killed and replaced
            for label in own.values():
                labels.free(label)
            workers[index], held[index] = EngineLabels(tmp_path), {}
        meanings = {(label, address) for one in held for address, label in one.items()}
        assert len(meanings) == len({label for label, _ in meanings}) == len({address for _, address in meanings})
        assert all(int(label) < len(addresses) for label, _ in meanings)
