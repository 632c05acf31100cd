"""Constants of the protocol between frontend and engine, on which both sides must agree. Standard library only."""

import hashlib
from collections.abc import Mapping

PROTOCOL_MAJOR = 1
PROTOCOL_MINOR = 3

BYTES_PER_TOKEN_ID = 4
"""Token ids travel as unsigned 32-bit integers, little-endian."""

MAX_FRONTEND_MESSAGE_BYTES = 16 << 20
"""Largest message that a frontend sends to an engine or takes from it."""

MAX_GRAMMAR_CHARS = 1 << 18
"""Longest grammar of a submission."""

MAX_TENANT_BYTES = 64
"""Longest name of a tenant."""

TOKENIZER_FILE_NAMES = (
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
)
"""Files of a tokenizer, of which only tokenizer.json is required. Its digest counts these and the chat templates in
`TEMPLATE_FOLDER`.
"""

TEMPLATE_FOLDER = "additional_chat_templates"
"""Folder of further chat templates, *.jinja."""

EXPECTED_OUTPUT_TOKENS = 256
"""Output tokens that an unfinished request is expected to generate: its cost in fair queueing and load balancing. Most
requests end long before max_tokens.
"""


def tokenizer_sha256(files: Mapping[str, bytes]) -> bytes:
    """Digest of a tokenizer, `EngineInfo.tokenizer_sha256`.

    Args:
        files: file name to content.

    Returns:
        SHA-256 over the files sorted by name; of each its name, a zero byte, its length as u64 little-endian, its data.
    """
    digest = hashlib.sha256()
    for name, data in sorted(files.items()):
        digest.update(name.encode() + b"\0" + len(data).to_bytes(8, "little"))
        digest.update(data)
    return digest.digest()
