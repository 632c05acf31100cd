"""Limits on the size of one request, for all endpoints; docs/limits.md lists them.

Limits of sampling and stopping parameters are in `chairlift.service.sampling_fields`. Those that depend on the model or
on a flag are not here. A limit on a count also bounds how long a request can block the event loop: before raising one,
run `python -m tests.support.frontend.isolation`.
"""

# One message.
MAX_REQUEST_BYTES = 8 << 20
"""Of an HTTP body or a gRPC request: more than six bytes of JSON for each of a million characters."""
SMALL_REQUEST_BYTES = 32 << 10
"""Up to this size a body or a message is parsed at once, which takes 1 ms at most; of a larger one, values are counted
first."""
MAX_JSON_VALUES = 1 << 15
"""Objects, arrays, strings, numbers and other values in a body, token ids excluded."""
MAX_JSON_DEPTH = 128
MAX_NUMBER_CHARS = 400
"""More digits than a float can have before its point."""
MAX_WIRE_FIELDS = 1 << 15
"""Of a gRPC request, nested messages included; a packed list of numbers counts as one."""
MAX_TEXT_BYTES = 3 << 20
"""Of a string, as UTF-8, and of a text to tokenize: the tokenizer's result is freed with the GIL held. Longer prompts
can be sent as token ids."""
MAX_TOKEN_IDS = 1 << 20
"""In all lists of a request together."""

# The prompt.
MAX_PROMPTS = 2048
MAX_ANSWERS = 128
"""Per prompt."""
MAX_TRUNCATED_CHARS = 1_000_000
"""Of a prompt that is truncated to fit; others are limited by the model's context."""
MAX_MESSAGES = 4096
MAX_CONTENT_PARTS = 1024
MAX_TOOL_CALLS = 128
"""Per message."""
MAX_TOOLS = 128
MAX_TOOLS_BYTES = 512 << 10
"""Of all tools and template variables, as JSON; over HTTP per parameter that is an object."""
MAX_ID_CHARS = 128

# The answer.
MAX_TOP_LOGPROBS = 20
MAX_CHOICES = 1000
MAX_CONSTRAINT_BYTES = 64 << 10
"""Of an output constraint: a schema, a regular expression or a grammar."""

# The response.
MAX_PROMPT_LOGPROBS = 1 << 18
"""Of one prompt: at most 9 bytes each (7 if the vocabulary has fewer than 2^21 tokens), plus the tokens' bytes."""
MAX_CALL_PROMPT_LOGPROBS = 1 << 20
"""In all choices of one HTTP call: 70 MB of JSON."""
MAX_ECHO_BYTES = 8 << 20
"""Of a prompt over gRPC; over HTTP of all choices of a call."""
