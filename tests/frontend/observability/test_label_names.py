"""Tests of the names that have series of their own: with several workers and their replacements too."""

import resource

import pytest
from prometheus_client import CollectorRegistry

from frontend.observability.label_names import LabelNames
from frontend.observability.request_metrics import MAX_MODELS, OTHER_MODELS, RequestMetrics
from frontend.observability.target_metrics import MAX_TENANTS, OTHER_TENANTS, TargetMetrics


def labels(registry, name):
    return {sample.labels[name] for metric in registry.collect() for sample in metric.samples if name in sample.labels}


@pytest.mark.parametrize("is_shared", [False, True])
def test_first_names_are_admitted(tmp_path, is_shared):
    names = LabelNames(2, tmp_path / "names" if is_shared else None)
    assert [names.admits(name) for name in ("a", "b", "c", "a", "b", "c")] == [True, True, False, True, True, False]


def test_all_workers_and_replacements_admit_the_same_names(tmp_path):
    first, second = LabelNames(3, tmp_path / "names"), LabelNames(3, tmp_path / "names")
    assert first.admits("a")
    assert second.admits("line\nend \ud800 é")
    assert first.admits("c")
    assert not second.admits("d")
    replacement = LabelNames(3, tmp_path / "names")
    for worker in (first, second, replacement):
        assert [worker.admits(name) for name in ("a", "line\nend \ud800 é", "c", "d")] == [True, True, True, False]


def test_names_are_not_admitted_while_the_file_cannot_be_written(tmp_path):
    names = LabelNames(2, tmp_path / "missing" / "names")
    assert not names.admits("a")
    (tmp_path / "missing").mkdir()
    assert names.admits("a")


def test_a_line_that_a_full_disk_cut_off_is_replaced(tmp_path):
    assert LabelNames(3, tmp_path / "names").admits("a")
    whole = (tmp_path / "names").stat().st_size
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (whole + 3, limits[1]))
        assert not LabelNames(3, tmp_path / "names").admits("long name")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / "names").stat().st_size == whole + 3
    for worker in (LabelNames(3, tmp_path / "names") for _ in range(2)):
        assert [worker.admits(name) for name in ("a", "b", "c", "d")] == [True, True, True, False]


def test_workers_have_series_of_the_same_models_and_tenants(tmp_path):
    models, tenants = set(), set()
    for worker in range(3):
        registry = CollectorRegistry()
        requests, targets = (kind("test", registry, tmp_path) for kind in (RequestMetrics, TargetMetrics))
        for i in range(2 * MAX_MODELS):
            requests.series(f"{worker}-{i}", "0")
        for i in range(2 * MAX_TENANTS):
            targets.note_tokens(f"{worker}-{i}", 1, 1)
        models |= labels(registry, "model_name")
        tenants |= labels(registry, "tenant")
    assert models == {*(f"0-{i}" for i in range(MAX_MODELS)), OTHER_MODELS}
    assert tenants == {*(f"0-{i}" for i in range(MAX_TENANTS)), OTHER_TENANTS}
