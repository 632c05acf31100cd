"""The Python client of a Chairlift server; needs grpc, protobuf and the stubs only. `chairlift` exports its names."""

from chairlift.client.async_client import AsyncClient, AsyncGenerationStream
from chairlift.client.connection import Tls
from chairlift.client.errors import FieldViolation, GenerationError
from chairlift.client.prompt_batch import Prompt
from chairlift.client.request import GenerationOptions
from chairlift.client.sync_client import Client, GenerationStream

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
