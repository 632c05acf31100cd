"""Qwen-Bailian's traces (ATC'25): JSON lines as Mooncake's, but seconds, 16-token blocks, and conversations.

chat_id and parent_chat_id chain the turns of a conversation; its first turn has parent -1. The session of a request is
the chat_id at the root of its chain, or the oldest parent that is named where the chain begins before the file does.
`turn` and `type` are not needed to run the trace and are read past.
"""

from loadgen.trace.formats import (
    Parser,
    ReadOptions,
    Record,
    Row,
    RowFormat,
    block_ids,
    real_number,
    tokens,
    whole_number,
)

BLOCK_TOKENS = 16


def _new_parser(_: ReadOptions) -> Parser:
    root_of: dict[int, int] = {}

    def parse(record: Record) -> Row:
        input_tokens = tokens(record, "input_length")
        chat = whole_number(record, "chat_id", low=0)
        parent = whole_number(record, "parent_chat_id", low=-1)
        row = Row(
            arrival_s=real_number(record, "timestamp"),
            input_tokens=input_tokens,
            output_tokens=tokens(record, "output_length"),
            blocks=block_ids(record, "hash_ids", input_tokens, BLOCK_TOKENS),
            block_tokens=BLOCK_TOKENS,
            session=chat if parent == -1 else root_of.get(parent, parent),
        )
        root_of[chat] = int(row.session or 0)
        return row

    return parse


FORMAT = RowFormat(
    name="bailian",
    description="Qwen-Bailian: JSON lines with chat_id, parent_chat_id, timestamp (s), input_length, output_length, "
    "hash_ids (16 tokens each)",
    kind="jsonl",
    required=frozenset(("chat_id", "parent_chat_id", "timestamp", "input_length", "output_length", "hash_ids")),
    new_parser=_new_parser,
)
