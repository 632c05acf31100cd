"""Mooncake's traces (FAST'25): JSON lines with timestamp in milliseconds, lengths, and one hash id per 512-token block.

Equal ids mean equal prefixes up to the end of the block, so the ids carry exactly what prompts share. The published
clocks
tick once in three seconds: see `loadgen.trace.window.dequantize`.
"""

from loadgen.trace.formats import Parser, ReadOptions, Record, Row, RowFormat, block_ids, real_number, tokens

BLOCK_TOKENS = 512


def _new_parser(_: ReadOptions) -> Parser:
    def parse(record: Record) -> Row:
        input_tokens = tokens(record, "input_length")
        return Row(
            arrival_s=real_number(record, "timestamp") / 1e3,
            input_tokens=input_tokens,
            output_tokens=tokens(record, "output_length"),
            blocks=block_ids(record, "hash_ids", input_tokens, BLOCK_TOKENS),
            block_tokens=BLOCK_TOKENS,
        )

    return parse


FORMAT = RowFormat(
    name="mooncake",
    description="Mooncake: JSON lines with timestamp (ms), input_length, output_length, hash_ids (512 tokens each)",
    kind="jsonl",
    required=frozenset(("timestamp", "input_length", "output_length", "hash_ids")),
    new_parser=_new_parser,
)
