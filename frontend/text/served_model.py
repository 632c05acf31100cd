"""The served model: its limits, tokenizer and sampling defaults."""

from dataclasses import dataclass
from typing import NamedTuple

from frontend.text.sampling_defaults import SamplingDefaults
from frontend.text.tokenizer import Tokenizer


class ModelKey(NamedTuple):
    """Properties that must be equal for two engines to serve the same requests, also in a failover."""

    name: str
    weights_revision: str
    tokenizer_sha256: bytes
    max_model_len: int
    vocab_size: int
    end_token_ids: tuple[int, ...]
    max_logprobs: int


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model of a connected engine; immutable, replaced when another engine connects.

    Attributes:
        name: name to use in requests.
        weights_revision: digest of the weights.
        max_model_len: most tokens of prompt and answer together.
        vocab_size: rows of the model's output matrix; every token id is below it.
        end_token_ids: tokens that end an answer.
        max_logprobs: most alternatives per token the engine gives.
        defaults: sampling values that apply where a request leaves one unset.
    """

    name: str
    weights_revision: str
    max_model_len: int
    vocab_size: int
    end_token_ids: tuple[int, ...]
    max_logprobs: int
    tokenizer: Tokenizer
    defaults: SamplingDefaults

    @property
    def key(self) -> ModelKey:
        """See ModelKey."""
        return ModelKey(
            self.name,
            self.weights_revision,
            self.tokenizer.sha256,
            self.max_model_len,
            self.vocab_size,
            self.end_token_ids,
            self.max_logprobs,
        )
