"""What holds for all tests.

GPU kernels run on the GPU where there is one, else under Triton's interpreter. Triton asks when it is imported, which a
test of anything may do: so this is decided here, first of all.
"""

import logging
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from chairlift.service.logs import PACKAGES
from tests.hang import HANG_S

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def one_thread_of_torch() -> None:
    """Matrices of tests gain nothing from more, and beside another process of tests every operation waits for them.

    An engine that a test builds sets its own number. OMP_NUM_THREADS, which `tests/portability` sets, decides.
    """
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def interruptible() -> Iterator[None]:
    """Processes that tests start hear SIGINT, even where the suite runs in the background with SIGINT ignored."""
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, previous)


@pytest.fixture(autouse=True)
def levels_of_loggers_end_with_the_test() -> Iterator[None]:
    """A program that a test runs in this process sets them, and later tests compare what is logged."""
    loggers = [logging.getLogger(package) for package in PACKAGES]
    levels = [logger.level for logger in loggers]
    yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


@pytest.fixture(autouse=True, scope="session")
def events_of_former_tests_are_not_logged() -> Iterator[None]:
    """Keeps errors about the gRPC calls of former tests out of the log, which tests compare.

    grpcio has one completion queue per process, and the event loop that runs now reads it. A call that a former test
    left open when its loop was closed ends at some time later, and grpcio then fails to call the closed loop.
    """
    logger = logging.getLogger("asyncio")
    logger.addFilter(_is_of_open_loop)
    yield
    logger.removeFilter(_is_of_open_loop)


def _is_of_open_loop(record: logging.LogRecord) -> bool:
    error = record.exc_info[1] if record.exc_info else None
    return not (str(error) == "Event loop is closed" and "CompletionQueue" in record.getMessage())


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks as slow the cases of a test that its marker `sampled` leaves to `make test-slow`."""
    cases: dict[str, list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("sampled"):
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for of_test in cases.values():
        marker = of_test[0].get_closest_marker("sampled")
        assert marker is not None
        kept = sample(of_test)[: marker.args[0] if marker.args else None]
        for item in of_test:
            if item not in kept:
                item.add_marker("slow")


def sample(cases: list[pytest.Function]) -> list[pytest.Function]:
    """As few of a test's cases as have every value of each parameter: each time the one with the most new values."""
    missing = {case: {f"{name}={value!r}" for name, value in case.callspec.params.items()} for case in cases}
    chosen: list[pytest.Function] = []
    while missing[case := max(cases, key=lambda case: len(missing[case]))]:
        chosen.append(case)
        found = set(missing[case])
        for values in missing.values():
            values -= found
    return chosen


class Certificate(NamedTuple):
    cert: Path
    key: Path


class Authority:
    """Signs certificates; `ca` is its own certificate, which clients trust."""

    def __init__(self, folder: Path, name: str) -> None:
        self._folder = folder
        self._name = name
        self.ca = folder / f"{name}.pem"
        self._key = folder / f"{name}.key"
        usage = ("-addext", "keyUsage=critical,keyCertSign,cRLSign")  # Python 3.13 and newer trust no other
        _openssl("req", "-x509", "-subj", f"/CN={name}", "-keyout", self._key, "-out", self.ca, *usage, *_NEW_KEY)

    def sign(self, name: str) -> Certificate:
        """A certificate for this machine."""
        made = Certificate(self._folder / f"{self._name}-{name}.pem", self._folder / f"{self._name}-{name}.key")
        request, names = made.cert.with_suffix(".csr"), made.cert.with_suffix(".names")
        names.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\nauthorityKeyIdentifier=keyid\n")
        _openssl("req", "-new", "-subj", f"/CN={name}", "-keyout", made.key, "-out", request, *_NEW_KEY)
        signer = ("-CA", self.ca, "-CAkey", self._key, "-CAcreateserial", "-days", "2", "-extfile", names)
        _openssl("x509", "-req", "-in", request, "-out", made.cert, *signer)
        return made


_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


def _openssl(*arguments: object) -> None:
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True, timeout=HANG_S)


@pytest.fixture(scope="session")
def make_authority(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Authority]:
    """make_authority(name) -> an authority that signs certificates."""
    if shutil.which("openssl") is None:
        pytest.skip("needs openssl")
    return lambda name: Authority(tmp_path_factory.mktemp("authority"), name)
