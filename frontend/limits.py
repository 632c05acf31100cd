"""The table of limits: how much one request may have of everything, whatever endpoint it comes through.

docs/limits.md says the same for users. What depends on the model (its context, its vocabulary) or on a flag is not
here. A limit on a count also bounds how long a request can hold the event loop, so one is raised only with a look at
what `python -m tests.support.frontend.isolation` prints.
"""

# One message.
MAX_REQUEST_BYTES = 8 << 20
"""Of an HTTP body or a gRPC request: six bytes of JSON for each of a million characters, and room to spare."""
MAX_JSON_VALUES = 1 << 15
"""Objects, arrays, strings, numbers and the like in a body, but for token ids."""
MAX_JSON_DEPTH = 128
MAX_NUMBER_CHARS = 400
"""More than a float can have digits before its point."""
MAX_WIRE_FIELDS = 1 << 15
"""Of a gRPC request, those of messages inside it counted; a packed list of numbers is one."""
MAX_TOKEN_IDS = 1 << 20
"""In all lists of a request together."""

# The prompt.
MAX_PROMPTS = 2048
MAX_ANSWERS = 128
"""To each prompt."""
MAX_TRUNCATED_CHARS = 1_000_000
"""Of a prompt that is cut to fit; others are bounded by the model's context."""
MAX_MESSAGES = 4096
MAX_CONTENT_PARTS = 1024
MAX_TOOL_CALLS = 128
"""In one message."""
MAX_TOOLS = 128
MAX_TOOLS_BYTES = 512 << 10
"""Of all tools and template variables, as JSON; over HTTP of each parameter that is an object."""
MAX_PROMPT_BYTES = 3 << 20
"""Of a text that is tokenized: the tokenizer's result is freed with the GIL held. A longer prompt can come as ids."""
MAX_ID_CHARS = 128

# The answer.
MIN_REPETITION_PENALTY = 0.1
MAX_REPETITION_PENALTY = 10.0
"""Logits are divided by it: far out of this range they would be infinite, or all of them 0."""
MAX_LOGIT_BIASES = 300
MAX_ALLOWED_TOKEN_IDS = 1 << 16
MAX_BAD_WORDS = 64
MAX_BAD_WORD_BYTES = 256
MAX_STOP_TEXTS = 16
MAX_STOP_TEXT_BYTES = 256
MAX_STOP_TOKEN_IDS = 64
MAX_TOP_LOGPROBS = 20
MAX_TIME_BUDGET_S = 24 * 3600
MAX_CHOICES = 1000
MAX_FORM_BYTES = 64 << 10
"""Of a schema, an expression or a grammar."""

# What comes back.
MAX_PROMPT_LOGPROBS = 1 << 18
"""Of one prompt: at most 9 bytes each (7 with fewer than 2^21 tokens in the vocabulary), and the tokens' bytes."""
MAX_CALL_PROMPT_LOGPROBS = 1 << 20
"""In all choices of one HTTP call: 70 MB of JSON."""
MAX_ECHO_BYTES = 8 << 20
"""Of a prompt over gRPC; over HTTP of all choices of a call."""
