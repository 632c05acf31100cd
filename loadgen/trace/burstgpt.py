"""BurstGPT's traces of ChatGPT and GPT-4: CSV, columns found by name, since BurstGPT_3 has two more in the middle.

Timestamps are seconds. Rows without prompt or answer tokens are requests that failed: they are left out and counted.
The third file names sessions. What prompts share is not known. CC-BY-4.0, Wang et al., arXiv:2401.17644.
"""

from loadgen.trace.formats import (
    MAX_TOKENS,
    LeftOut,
    Parser,
    ReadOptions,
    Record,
    Row,
    RowFormat,
    real_number,
    whole_number,
)


def _new_parser(options: ReadOptions) -> Parser:
    def parse(record: Record) -> Row | LeftOut:
        arrival_s = real_number(record, "Timestamp")
        input_tokens = whole_number(record, "Request tokens", low=0, high=MAX_TOKENS)
        output_tokens = whole_number(record, "Response tokens", low=0, high=MAX_TOKENS)
        if options.model and record["Model"] != options.model:
            return LeftOut(f"of another model than {options.model}")
        if output_tokens == 0:
            return LeftOut("failed: 0 response tokens")
        if input_tokens == 0:
            return LeftOut("0 request tokens")
        return Row(arrival_s, input_tokens, output_tokens, session=record.get("Session ID") or None)

    return parse


FORMAT = RowFormat(
    name="burstgpt",
    description="BurstGPT: CSV with Timestamp (s), Model, Request tokens, Response tokens",
    kind="csv",
    required=frozenset(("Timestamp", "Model", "Request tokens", "Response tokens")),
    new_parser=_new_parser,
)
