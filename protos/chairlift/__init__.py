"""Chairlift's public Python package: the client, beside the stubs of both protos.

from chairlift import Client

with Client("127.0.0.1:50051") as client:
    for chunk in client.stream("Once upon a time", max_tokens=64):
        print(chunk.text, end="", flush=True)

The client is imported on first use, so that `import chairlift.v1` costs the stubs alone.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from chairlift.client import (
        AsyncClient,
        AsyncGenerationStream,
        Client,
        FieldViolation,
        GenerationError,
        GenerationOptions,
        GenerationStream,
        Prompt,
        Tls,
    )

__all__ = [
    "AsyncClient",
    "AsyncGenerationStream",
    "Client",
    "FieldViolation",
    "GenerationError",
    "GenerationOptions",
    "GenerationStream",
    "Prompt",
    "Tls",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import chairlift.client

    return getattr(chairlift.client, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
