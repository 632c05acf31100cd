"""Deprecated path of the Python client, kept for one release: use `from chairlift import Client, AsyncClient`."""

import warnings

from chairlift import (
    AsyncClient as AsyncChairliftClient,
)
from chairlift import (
    AsyncGenerationStream,
    FieldViolation,
    GenerationError,
    GenerationOptions,
    GenerationStream,
    Prompt,
    Tls,
)
from chairlift import (
    Client as ChairliftClient,
)

__all__ = [
    "AsyncChairliftClient",
    "AsyncGenerationStream",
    "ChairliftClient",
    "FieldViolation",
    "GenerationError",
    "GenerationOptions",
    "GenerationStream",
    "Prompt",
    "Tls",
]

warnings.warn(
    "frontend.client is deprecated and will be removed in the next release: use `from chairlift import Client, "
    "AsyncClient`",
    DeprecationWarning,
    stacklevel=2,
)
