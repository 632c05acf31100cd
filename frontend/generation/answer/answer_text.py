"""Converts tokens to text that may be sent: detokenizes, matches stop texts, removes end and stop tokens."""

from collections.abc import Collection, Sequence
from typing import NamedTuple

from chairlift.service.end_reason import EndReason
from frontend.generation.answer.stop_texts import StopTextMatcher
from frontend.request.request import GenerationRequest
from frontend.routing.stream import TokenBatch
from frontend.text.detokenizer import NO_MARKS
from frontend.text.tokenizer import Tokenizer


class TextDelta(NamedTuple):
    """What a batch of tokens adds to the answer.

    Attributes:
        text: final text; may lag behind the tokens.
        num_tokens: tokens of the batch that belong to the answer: all, or those up to a stop text.
        stop_text: stop text that ends the answer; None: none has matched.
    """

    text: str
    num_tokens: int
    stop_text: str | None


class AnswerText:
    """The text of one answer.

    Args:
        end_token_ids: the model's.
        marks, after: see `make_detokenizer`.
    """

    def __init__(
        self,
        request: GenerationRequest,
        tokenizer: Tokenizer,
        *,
        end_token_ids: Collection[int] = (),
        marks: frozenset[int] = NO_MARKS,
        after: Sequence[int] = (),
    ) -> None:
        self._wanted = request.output.text
        self._keep_special_tokens = request.output.keep_special_tokens
        self._marks = marks
        stop = request.stop
        self._min_tokens = stop.min_tokens
        self._ending_ids = frozenset((*stop.stop_token_ids, *end_token_ids))
        self._held: list[int] = []  # a token that may have ended the answer
        self._matcher = StopTextMatcher(stop.stop_texts, include=stop.include_stop_text) if stop.stop_texts else None
        self._detokenizer = tokenizer.detokenizer(
            keep_special_tokens=self._keep_special_tokens, marks=marks, after=after
        )

    def push(self, batch: TokenBatch) -> TextDelta:
        """Takes a batch; the last one releases the text that was held back."""
        if not self._wanted and self._matcher is None:
            return TextDelta("", len(batch.token_ids), None)
        if self._matcher is None:
            text = self._detokenizer.push(self._visible_ids(batch))
            if batch.end is not None:
                text += self._detokenizer.finish()
            return TextDelta(text, len(batch.token_ids), None)
        delta = self._match(self._matcher, batch)
        return delta if self._wanted else delta._replace(text="")

    def _match(self, matcher: StopTextMatcher, batch: TokenBatch) -> TextDelta:
        # Token by token: the answer ends with the token that completes a stop text, if it follows min_tokens others.
        parts, num_held = [], len(self._held)
        for num_tokens, token_id in enumerate(self._visible_ids(batch), 1 - num_held):
            may_match = batch.first_index + num_tokens > self._min_tokens
            parts.append(matcher.push(self._detokenizer.push((token_id,)), may_match=may_match))
            if matcher.matched is not None:
                return TextDelta("".join(parts), num_tokens, matcher.matched)
        if batch.end is not None:
            may_match = batch.first_index + len(batch.token_ids) > self._min_tokens
            parts.append(matcher.push(self._detokenizer.finish(), may_match=may_match))
            if matcher.matched is None:
                parts.append(matcher.finish())
        return TextDelta("".join(parts), len(batch.token_ids), matcher.matched)

    def _visible_ids(self, batch: TokenBatch) -> list[int]:
        """Removes the token that ended the answer: a stop token always, an end token unless it has text.

        Holds back a token that may be that one, because other projects' engines send the end in a message of its own.
        """
        ids, self._held = self._held + batch.token_ids, []
        if not ids:
            return ids
        if batch.end is None:
            if ids[-1] in self._ending_ids:
                self._held = [ids.pop()]
            return ids
        reason = batch.end.reason
        has_text = self._keep_special_tokens or ids[-1] in self._marks
        hidden = reason is EndReason.STOP_TOKEN or (reason is EndReason.END_TOKEN and not has_text)
        return ids[:-1] if hidden else ids
