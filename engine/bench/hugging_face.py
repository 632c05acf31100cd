"""`transformers`, a development dependency: imported when it is needed, and without its progress bars."""

import importlib
from typing import Any

from chairlift.bench.benchmark import BenchmarkError


def import_transformers() -> Any:
    """The module; typed loosely, as most of its functions are untyped.

    Raises: BenchmarkError: it is not installed.
    """
    try:
        transformers = importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise BenchmarkError(f"{error}: install chairlift[dev]") from error
    transformers.utils.logging.disable_progress_bar()
    return transformers
