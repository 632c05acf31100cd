"""Matches stop texts in an answer that arrives in pieces; holds back text that may become a match.

The match that completes first wins; of several that complete at the same character, the longest. So an answer is cut as
early as possible, at a position independent of chunking, and no token is generated to decide between matches.
"""

import re
from collections import deque
from collections.abc import Sequence


class StopTextMatcher:
    """Automaton of one answer's stop texts (Aho and Corasick, CACM 18(6), 1975).

    A state is the longest suffix of the text that is a prefix of a stop text; its length is held back.

    Args:
        stop_texts: may be empty; each has at least one character.
        include: keep the matched stop text in the answer. Then nothing is held back.

    Raises:
        ValueError: a stop text is empty.
    """

    def __init__(self, stop_texts: Sequence[str], *, include: bool) -> None:
        if "" in stop_texts:
            raise ValueError("a stop text must have at least one character")
        self._include = include
        self._held = ""
        self._matched: str | None = None
        self._state = 0
        self._next: list[dict[str, int]] = [{}]  # trie edges per state; 0 is the root
        self._fail = [0]  # state of the longest proper suffix
        self._depth = [0]
        self._match: list[str | None] = [None]  # longest stop text that ends in this state
        for stop_text in stop_texts:
            self._add(stop_text)
        self._link_suffixes()
        # Most characters start no stop text: a compiled search skips them.
        first = "".join(re.escape(char) for char in self._next[0])
        self._first = re.compile(f"[{first}]") if first else None

    @property
    def matched(self) -> str | None:
        """The matched stop text; None: no match yet."""
        return self._matched

    def push(self, text: str, *, may_match: bool = True) -> str:
        """Takes the next piece of the answer; returns text that may be sent, empty after a match.

        Args:
            may_match: whether a stop text that this piece completes ends the answer. Later ones may begin in it anyway.
        """
        if self._matched is not None:
            return ""
        if self._first is None:
            return text
        position = 0
        while position < len(text):
            if self._state == 0:
                candidate = self._first.search(text, position)
                if candidate is None:
                    break
                position = candidate.start()
            self._state = self._step(self._state, text[position])
            position += 1
            self._matched = self._match[self._state] if may_match else None
            if self._matched is not None:
                return self._cut(text[:position], self._matched)
        if self._include:
            return text
        text = self._held + text
        num_safe = len(text) - self._depth[self._state]
        self._held = text[num_safe:]
        return text[:num_safe]

    def finish(self) -> str:
        """Ends the answer; returns the text that was held back."""
        held, self._held = self._held, ""
        return held

    def _cut(self, text: str, matched: str) -> str:
        if self._include:
            return text
        text = self._held + text
        self._held = ""
        return text[: len(text) - len(matched)]

    def _step(self, state: int, char: str) -> int:
        while state and char not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(char, 0)

    def _add(self, stop_text: str) -> None:
        state = 0
        for char in stop_text:
            following = self._next[state].get(char)
            if following is None:
                following = len(self._next)
                self._next[state][char] = following
                self._next.append({})
                self._fail.append(0)
                self._depth.append(self._depth[state] + 1)
                self._match.append(None)
            state = following
        self._match[state] = stop_text

    def _link_suffixes(self) -> None:
        """Links states to their suffixes, breadth first, so that shorter suffixes are linked first."""
        queue = deque(self._next[0].values())
        while queue:
            state = queue.popleft()
            for char, following in self._next[state].items():
                self._fail[following] = self._step(self._fail[state], char)
                if self._match[following] is None:
                    self._match[following] = self._match[self._fail[following]]
                queue.append(following)
