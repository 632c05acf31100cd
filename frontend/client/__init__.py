"""The Python client of Chairlift: the generated stubs, grpc and protobuf, nothing of the server.

from frontend.client import ChairliftClient

with ChairliftClient() as client:
    for chunk in client.stream("Once upon a time", max_tokens=64):
        print(chunk.text, end="", flush=True)
"""

from frontend.client.async_client import AsyncChairliftClient, AsyncGenerationStream
from frontend.client.connection import Tls
from frontend.client.errors import FieldViolation, GenerationError
from frontend.client.prompt_batch import Prompt
from frontend.client.request import GenerationOptions
from frontend.client.sync_client import ChairliftClient, GenerationStream

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
