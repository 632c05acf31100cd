"""The served model: its limits, tokenizer and sampling defaults."""

from dataclasses import dataclass, replace
from typing import NamedTuple

from frontend.text.sampling_defaults import SamplingDefaults
from frontend.text.tokenizer import Tokenizer


class Adapter(NamedTuple):
    """A LoRA adapter of a model.

    Attributes:
        name: its name in requests.
        sha256: digest of its files.
        path: from which engines loaded it at run time; empty if they had it from their start.
    """

    name: str
    sha256: bytes
    path: str = ""


class ModelKey(NamedTuple):
    """Properties that must be equal for two engines to serve the same requests, also in a failover.

    Adapters are none of them: an engine serves requests for those that it has. `weights_revision` is empty for engines
    of other projects, which do not report it.
    """

    name: str
    weights_revision: str
    tokenizer_sha256: bytes
    max_model_len: int
    vocab_size: int
    end_token_ids: tuple[int, ...]
    max_logprobs: int

    def matches(self, other: "ModelKey") -> bool:
        """Whether engines with these keys may serve the same requests, as far as is known."""
        if self.weights_revision and other.weights_revision:
            return self == other
        return self._without_revision() == other._without_revision()

    def _without_revision(self) -> "ModelKey":
        return self._replace(weights_revision="", end_token_ids=tuple(sorted(self.end_token_ids)))


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model of a connected engine, or the model with one of its adapters; immutable, replaced when another engine
    connects.

    Attributes:
        name: its name in requests and answers.
        weights_revision: digest of the weights, without adapters.
        max_model_len: most tokens of prompt and answer together.
        vocab_size: rows of the model's output matrix; every token id is below it.
        end_token_ids: tokens that end an answer.
        max_logprobs: most alternatives per token the engine gives.
        defaults: sampling values that apply where a request leaves one unset.
        adapters: the LoRA adapters that some engine has.
        parent: with an adapter, whose name is then `name`, the name of the model without; otherwise None.
        aliases: further names in requests; none with an adapter.
    """

    name: str
    weights_revision: str
    max_model_len: int
    vocab_size: int
    end_token_ids: tuple[int, ...]
    max_logprobs: int
    tokenizer: Tokenizer
    defaults: SamplingDefaults
    adapters: tuple[Adapter, ...] = ()
    parent: str | None = None
    aliases: tuple[str, ...] = ()

    def named(self, name: str) -> "ServedModel | None":
        """Returns the model that a request names: this one, also for an empty name, or one of its adapters."""
        if name in ("", self.name, *self.aliases):
            return self
        if any(adapter.name == name for adapter in self.adapters):
            return replace(self, name=name, parent=self.parent or self.name, aliases=())
        return None

    @property
    def adapter(self) -> str:
        """Name of the adapter; empty without."""
        return self.name if self.parent is not None else ""

    @property
    def adapter_sha256(self) -> bytes:
        """Digest of the adapter; empty without."""
        if self.parent is None:
            return b""
        return next(adapter.sha256 for adapter in self.adapters if adapter.name == self.name)

    @property
    def key(self) -> ModelKey:
        """See ModelKey."""
        return ModelKey(
            self.parent or self.name,
            self.weights_revision,
            self.tokenizer.sha256,
            self.max_model_len,
            self.vocab_size,
            self.end_token_ids,
            self.max_logprobs,
        )
