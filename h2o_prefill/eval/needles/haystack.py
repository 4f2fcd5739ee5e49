"""A text to hide needles in."""

from __future__ import annotations

import bisect
import random
import re
from collections.abc import Iterable

# A word and the white space after it.
_WORD = re.compile(r"\S+\s*")
# A full stop with what may close around it, or a new line. Abbreviations count too: a needle may
# then stand within a sentence, which does no harm.
_ENDS_SENTENCE = re.compile(r"""[.!?]["'”’)\]]*\s*\Z|\n""")


class Haystack:
    """A text as words, with the places where sentences end.

    Parameters
    ----------
    text : str
        It is taken as it is, white space included.

    Attributes
    ----------
    lower : str
        The text in lower case.
    """

    def __init__(self, text: str) -> None:
        self.lower = text.lower()
        self._words = _WORD.findall(text)
        # Words before each place where a sentence begins.
        self._begins = [0]
        for index, word in enumerate(self._words):
            if _ENDS_SENTENCE.search(word):
                self._begins.append(index + 1)

    def __len__(self) -> int:
        """Count the words."""
        return len(self._words)

    def draw_begin(self, rng: random.Random, words: int) -> int:
        """Draw the first word of a piece: a sentence begins there, and `words` follow if any can.

        Parameters
        ----------
        rng : random.Random
        words : int
            What the piece may need.
        """
        last = bisect.bisect_right(self._begins, len(self) - words)
        return self._begins[rng.randrange(max(1, last))]

    def piece(self, begin: int, words: int, needles: Iterable[tuple[float, str]]) -> str:
        """Return a piece of the text with needles in it.

        Parameters
        ----------
        begin : int
            First word.
        words : int
            Words of the text.
        needles : iterable of (float, str)
            Depth in percent of `words`, and the sentence. A needle goes to the beginning of a
            sentence that is nearest to its depth; two at one place keep their order.
        """
        first = bisect.bisect_left(self._begins, begin)
        past = bisect.bisect_right(self._begins, begin + words)
        places = self._begins[first:past]
        parts: list[str] = []
        done = begin
        located = [(_nearest(places, begin + depth / 100 * words), text) for depth, text in needles]
        for place, needle in sorted(located, key=lambda item: item[0]):
            parts += [_spaced("".join(self._words[done:place])), needle, " "]
            done = place
        parts.append("".join(self._words[done : begin + words]))
        return "".join(parts).rstrip()


def _nearest(places: list[int], target: float) -> int:
    return min(places, key=lambda place: abs(place - target))


def _spaced(text: str) -> str:
    """The last word of a text has no white space after it."""
    return text if not text or text[-1].isspace() else f"{text} "
