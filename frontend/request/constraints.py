"""Converts constraints for the engine: bad words to token ids, structured output to a grammar."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from frontend.request.request import GenerationRequest
from frontend.text.served_model import ServedModel
from frontend.text.structured.compiler import GrammarCompiler
from frontend.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Constraints:
    """Constraints on the answers to one request.

    Attributes:
        grammar: grammar for llguidance; empty without one.
        bad_sequences: sequences of at least one token id that are never generated.
    """

    grammar: str = ""
    bad_sequences: tuple[tuple[int, ...], ...] = ()


async def constraints_of(
    request: GenerationRequest, model: ServedModel, grammars: GrammarCompiler, *, before: str
) -> Constraints:
    """Returns the constraints of a checked request.

    Args:
        before: rules for the output before the structured part; see `OutputConstraint`.

    Raises:
        InvalidRequest: the output constraint is not supported.
        QueueFull, ServerDraining: see `GrammarCompiler.compile`.
    """
    words = request.sampling.bad_words
    constraint = None if request.constraint is None else replace(request.constraint, before=before)
    return Constraints(
        grammar=await grammars.compile(constraint, model) if constraint is not None else "",
        bad_sequences=await bad_sequences(words, model.tokenizer) if words else (),
    )


async def bad_sequences(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """Returns the token ids of words at the start of a text and after a space, as in vLLM."""
    texts = [text for word in words for text in (word.lstrip(), " " + word.lstrip())]
    return tuple(dict.fromkeys(tuple(ids) for ids in await tokenizer.encode_words(texts) if ids))
