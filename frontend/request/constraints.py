"""What an answer must not or must be, in the engine's words: bad words as token ids, a form as a grammar."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from frontend.request.request import GenerationRequest
from frontend.text.served_model import ServedModel
from frontend.text.structured.compiler import GrammarCompiler
from frontend.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Constraints:
    """What the engine holds the answers to one request to.

    Attributes:
        grammar: as llguidance takes it; empty: none.
        bad_sequences: token ids that never follow one another, each at least one.
    """

    grammar: str = ""
    bad_sequences: tuple[tuple[int, ...], ...] = ()


async def constraints_of(
    request: GenerationRequest, model: ServedModel, grammars: GrammarCompiler, *, before: str
) -> Constraints:
    """The constraints of a checked request.

    Args:
        before: rules for what comes before the form; see `OutputForm`.

    Raises:
        InvalidRequest: its form is none that answers can be held to.
        QueueFull, ServerDraining: see `GrammarCompiler.compile`.
    """
    words = request.sampling.bad_words
    form = None if request.form is None else replace(request.form, before=before)
    return Constraints(
        grammar=await grammars.compile(form, model) if form is not None else "",
        bad_sequences=await bad_sequences(words, model.tokenizer) if words else (),
    )


async def bad_sequences(words: Sequence[str], tokenizer: Tokenizer) -> tuple[tuple[int, ...], ...]:
    """The token ids of words at the beginning of a text and, behind a space, in the middle of one; as vLLM does it."""
    texts = [text for word in words for text in (word.lstrip(), " " + word.lstrip())]
    return tuple(dict.fromkeys(tuple(ids) for ids in await tokenizer.encode_words(texts) if ids))
