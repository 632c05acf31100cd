"""The Python client of Chairlift: the generated stubs, grpc and protobuf, nothing of the server.

from chairlift.client import ChairliftClient

with ChairliftClient() as client:
    for chunk in client.stream("Once upon a time", max_tokens=64):
        print(chunk.text, end="", flush=True)
"""

from chairlift.client.async_client import AsyncChairliftClient, AsyncGenerationStream
from chairlift.client.connection import Tls
from chairlift.client.errors import FieldViolation, GenerationError
from chairlift.client.prompt_batch import Prompt
from chairlift.client.request import GenerationOptions
from chairlift.client.sync_client import ChairliftClient, GenerationStream

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
