"""Sampling and stopping parameters: name, type, range and default of each, declared once.

Both checks (frontend and engine), the fields of the HTTP bodies, the flags of `chairlift generate`, OpenAPI, the tables
of docs/api.md and the comments of the public proto derive from these dataclasses or are tested against them. To add a
parameter, add a field here. Standard library only.
"""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Annotated, Any, get_args, get_type_hints

DEFAULT_MAX_TOKENS = 256
"""Output tokens of a request that sets no max_tokens, if that many fit the model's context."""

TokenIds = tuple[int, ...]
Texts = tuple[str, ...]
Biases = tuple[tuple[int, float], ...]
"""Pairs of token id and value."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What a parameter does and which values it takes.

    Attributes:
        doc: one clause for documentation and `--help`, without a period.
        minimum, maximum: bounds of a number, or of each value of a bias list.
        above_minimum: the minimum itself is not allowed.
        max_entries: most entries of a list.
        max_entry_bytes: most bytes of a text in UTF-8.
        allows_blank: a text may be nothing but white space.
        unit: of a number, with a leading space.
        range: allowed values, if bounds do not say it.
        unset: what applies if the parameter is not set, if the default does not say it.
        from_model: the model's generation_config.json sets the default.
        http_name: the parameter's name over HTTP, if it differs.
    """

    doc: str
    minimum: float = 0
    maximum: float = 2**32 - 1
    above_minimum: bool = False
    max_entries: int = 0
    max_entry_bytes: int = 0
    allows_blank: bool = False
    unit: str = ""
    range: str = ""
    unset: str = ""
    from_model: bool = False
    http_name: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn, every value set; frontend and engine alike."""

    temperature: Annotated[float, Rule("Sets the softmax temperature; 0 is greedy", 0, 100, from_model=True)] = 1.0
    top_p: Annotated[
        float,
        Rule("Keeps the smallest set of tokens with this total probability", 0, 1, above_minimum=True, from_model=True),
    ] = 1.0
    top_k: Annotated[
        int, Rule("Keeps the k most probable tokens; 0 keeps all", range="0 to 2^32 - 1", from_model=True)
    ] = 0
    min_p: Annotated[
        float, Rule("Keeps tokens at least this fraction as probable as the best one", 0, 1, from_model=True)
    ] = 0.0
    # Far out of its range, logits divided by the penalty become infinite or all 0.
    repetition_penalty: Annotated[
        float,
        Rule(
            "Divides positive and multiplies negative logits of tokens in prompt or answer; 1 is off",
            0.1,
            10,
            from_model=True,
        ),
    ] = 1.0
    presence_penalty: Annotated[
        float, Rule("Lowers the logit of each token that is in the answer; 0 is off", -2, 2)
    ] = 0.0
    frequency_penalty: Annotated[
        float, Rule("Lowers the logit of a token for each time it is in the answer; 0 is off", -2, 2)
    ] = 0.0
    seed: Annotated[
        int, Rule("Seeds the request's random numbers", 0, 2**64 - 1, range="0 to 2^64 - 1", unset="random")
    ]
    logit_bias: Annotated[
        Biases, Rule("Adds these values to the logits of token ids", -100, 100, max_entries=300, unset="none")
    ] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingOptions(Sampling):
    """How tokens are drawn, as a client asks for it."""

    allowed_token_ids: Annotated[
        TokenIds,
        Rule("Generates only these tokens; end tokens too only if listed", max_entries=1 << 16, unset="all"),
    ] = ()
    bad_words: Annotated[
        Texts,
        Rule(
            "Never generates the tokens of these texts, with or without a leading space",
            max_entries=64,
            max_entry_bytes=256,
            unset="none",
        ),
    ] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class StopOptions:
    """When an answer ends."""

    max_tokens: Annotated[
        int | None,
        Rule(
            "Limits the output tokens; 0 returns only the prompt, with echo or prompt_logprobs",
            range="0 to what fits",
            unset=f"what fits, at most {DEFAULT_MAX_TOKENS}",
        ),
    ] = None
    min_tokens: Annotated[
        int,
        Rule(
            "Generates no end token and no stop token before this many tokens, and ends at no stop text within them",
            range="0 to max_tokens",
        ),
    ] = 0
    stop_texts: Annotated[
        Texts,
        Rule(
            "Ends when the answer's text contains one of these",
            max_entries=16,
            max_entry_bytes=256,
            allows_blank=True,
            unset="none",
            http_name="stop",
        ),
    ] = ()
    stop_token_ids: Annotated[
        TokenIds,
        Rule("Ends at one of these tokens, which is not part of the text", max_entries=64, unset="none"),
    ] = ()
    include_stop_text: Annotated[
        bool, Rule("Keeps the matched stop text in the answer", http_name="include_stop_str_in_output")
    ] = False
    ignore_end_token: Annotated[bool, Rule("Does not end at the model's end tokens", http_name="ignore_eos")] = False
    time_budget_s: Annotated[
        float | None,
        Rule(
            "Ends without an error, with the tokens so far, this long after acceptance",
            0,
            24 * 3600,
            above_minimum=True,
            unit=" s",
            range="above 0, to 24 hours",
            unset="none",
        ),
    ] = None


@dataclass(frozen=True, slots=True)
class Parameter:
    """One row of the table.

    Attributes:
        name: of the dataclass's field.
        kind: float, int, bool, TokenIds, Texts or Biases.
        default: None if the dataclass has none.
    """

    name: str
    kind: Any
    default: Any
    rule: Rule

    @property
    def public_name(self) -> str:
        """Name in the public proto and in docs."""
        return self.name.removesuffix("_s")

    @property
    def http_name(self) -> str:
        """Name in bodies over HTTP."""
        return self.rule.http_name or self.public_name

    @property
    def range(self) -> str:
        """Allowed values, for people."""
        rule = self.rule
        if rule.range:
            return rule.range
        bounds = f"above {rule.minimum:g}, to {rule.maximum:g}" if rule.above_minimum else None
        bounds = bounds or f"{rule.minimum:g} to {rule.maximum:g}"
        if self.kind == Texts:
            return f"{rule.max_entries} texts of {rule.max_entry_bytes} bytes"
        if self.kind == Biases:
            return f"{rule.max_entries} entries, {bounds}"
        if self.kind == TokenIds:
            return f"{rule.max_entries:,} entries"
        return "" if self.kind is bool else bounds

    @property
    def unset(self) -> str:
        """What applies if the parameter is not set, for people."""
        if self.rule.unset:
            return self.rule.unset
        text = "false" if self.kind is bool else f"{self.default:g}"
        return f"the model's, else {text}" if self.rule.from_model else text

    @property
    def limits(self) -> str:
        """Range and default as sentences, for `--help`, OpenAPI and the proto."""
        allowed = f"Range: {self.range}. " if self.range else ""
        return f"{allowed}Default: {self.unset}."

    def problem(self, value: Any, vocab_size: int) -> str | None:
        """Checks a value.

        Returns: what is wrong, to follow the parameter's name; None: nothing is.
        """
        rule = self.rule
        if self.kind in (int, float):
            return self._range_problem("is", value)
        if self.kind is bool:
            return None
        if len(value) > rule.max_entries:
            return f"has {len(value)} entries, at most {rule.max_entries} are allowed"
        if self.kind == Texts:
            return next(filter(None, map(self._text_problem, value)), None)
        ids = [token_id for token_id, _ in value] if self.kind == Biases else value
        largest = max(ids, default=0)
        if largest >= vocab_size:
            return f"contains token id {largest}, the vocabulary has {vocab_size} tokens"
        if self.kind == Biases:
            return next(filter(None, (self._range_problem("has a value of", bias) for _, bias in value)), None)
        return None

    def _range_problem(self, verb: str, value: float) -> str | None:
        rule = self.rule
        if rule.minimum <= value <= rule.maximum and not (rule.above_minimum and value == rule.minimum):
            return None  # NaN is in no range
        bounds = f"{'above' if rule.above_minimum else 'at least'} {rule.minimum:g} and at most {rule.maximum:g}"
        return f"{verb} {value:g}{rule.unit}, it must be {bounds}{rule.unit}"

    def _text_problem(self, text: str) -> str | None:
        if not (text if self.rule.allows_blank else text.strip()):
            return "has an empty entry, each needs text"
        num_bytes = len(text.encode())
        if num_bytes > self.rule.max_entry_bytes:
            return f"has {num_bytes} bytes in one entry, at most {self.rule.max_entry_bytes} are allowed"
        return None


def _parameters(table: type) -> Mapping[str, Parameter]:
    hints = get_type_hints(table, include_extras=True)
    rows = {}
    for field in fields(table):
        kind, rule = get_args(hints[field.name])
        if type(None) in get_args(kind):
            kind = get_args(kind)[0]
        rows[field.name] = Parameter(field.name, kind, None if field.default is MISSING else field.default, rule)
    return rows


SAMPLING = _parameters(SamplingOptions)
ENGINE_SAMPLING = _parameters(Sampling)
STOPPING = _parameters(StopOptions)

_SEED_STEP = 0x9E3779B97F4A7C15  # 2^64 divided by the golden ratio: its first multiples are far apart


def seed_of_answer(seed: int, index: int) -> int:
    """Returns the seed of answer `index` to a request with several; the public proto documents it.

    Adding a large odd number keeps the seeds different from each other and from those of requests with neighbouring
    seeds.
    """
    return (seed + index * _SEED_STEP) % 2**64
