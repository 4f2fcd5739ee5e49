"""Windows in which a passage comes again in another form, so that few of its tokens repeat."""

from __future__ import annotations

import builtins
import contextlib
import inspect
import io
import json
import keyword
import random
import re
import textwrap
import tokenize
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from h2o_prefill.generation.text import encode

# Characters that are tokenised for each token that is needed: prose has about 4 a token.
_CHARACTERS = 16
_SEPARATOR = " | "

# A spelling by sound; it changes every third word of English prose.
_SPELLINGS = (
    ("tion", "shun"),
    ("igh", "y"),
    ("th", "dh"),
    ("ph", "f"),
    ("ck", "k"),
    ("wh", "w"),
    ("ea", "ee"),
    ("ou", "ow"),
    ("ai", "ay"),
    ("oo", "u"),
    ("ll", "l"),
    ("ss", "s"),
    ("ed ", "d "),
    ("ing ", "in "),
)


class Variation(NamedTuple):
    """A passage, and the form in which it comes again."""

    passage: Callable[[str], str]  # the passage and what follows it, of a text
    change: Callable[[str], str]
    # Whether the tokens between the two are what follows the passage, instead of other text.
    among_its_like: bool = False


class VariedWindow(NamedTuple):
    """Tokens of a window: a passage, other tokens, the changed passage."""

    input_ids: Tensor  # int64 [T]
    changed: int  # position of the first token of the changed passage, which reaches to the end


def build_window(name: str, tokenizer: Any, text: str, context: int) -> VariedWindow:
    """Compose the window of one of `VARIATIONS` from a text, the same in every process.

    The passage is a quarter of the window, its change at most another quarter, and about half a
    window of other tokens stands between them. Raises ValueError if the text is too short.
    """
    kind, quarter, half = VARIATIONS[name], context // 4, len(text) // 2
    size = _CHARACTERS * context
    source = encode(tokenizer, kind.passage(text[half // 2 : half][:size])[:size])
    passage = source[:quarter]
    again = kind.change(str(tokenizer.decode(passage, skip_special_tokens=True)))
    changed = _encode_inside(tokenizer, f"\n\n{again}")[:quarter]
    other = source[quarter:]
    if not kind.among_its_like:
        other = _encode_inside(tokenizer, text[half:][:size])
    between = other[: context - len(passage) - len(changed)]
    window = torch.cat([passage, between, changed])
    if len(window) < context:
        raise ValueError(
            f"text must be longer for windows of {context} tokens: {len(text)} characters are too "
            "few"
        )
    return VariedWindow(window, context - len(changed))


def _encode_inside(tokenizer: Any, text: str) -> Tensor:
    """Return the tokens of a text that does not begin a prompt, int64 [tokens]."""
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    return torch.tensor(ids, dtype=torch.int64)


def _same(text: str) -> str:
    return text


def _respell(text: str) -> str:
    for usual, other in _SPELLINGS:
        text = text.replace(usual, other)
    return text


def _space_out(text: str) -> str:
    """Put spaces around punctuation, and two between words."""
    return re.sub(r" +", "  ", re.sub(r"([^\w\s])", r" \1 ", text))


def _narrow(text: str) -> str:
    """Break lines anew, after at most 24 characters."""
    return "\n".join(textwrap.wrap(text, 24))


def _drop_punctuation(text: str) -> str:
    return re.sub(r"[^\w\s]", "", text)


def _code(text: str) -> str:
    import argparse

    source = inspect.getsource(argparse)
    return source[source.index("\nimport ") :]


def _rename(code: str) -> str:
    """Give other names to all that the code names itself; the last line may be incomplete."""
    known = {*keyword.kwlist, *keyword.softkwlist, *dir(builtins), "self"}
    lines = code.splitlines(keepends=True)[:-1]
    found: list[tokenize.TokenInfo] = []
    with contextlib.suppress(tokenize.TokenError):  # the last statement may be incomplete
        found.extend(tokenize.generate_tokens(io.StringIO("".join(lines)).readline))
    own = [x for x in found if x.type == tokenize.NAME and x.string not in known]
    names = {name: f"item{i}" for i, name in enumerate(dict.fromkeys(x.string for x in own))}
    for token in reversed(own):
        (row, begin), (_, end) = token.start, token.end
        line = lines[row - 1]
        lines[row - 1] = f"{line[:begin]}{names[token.string]}{line[end:]}"
    return "".join(lines)


def _draw_rows(text: str, draw: Callable[[random.Random, list[str]], str]) -> str:
    """Return rows that are drawn with words of the text, one for 64 characters of it."""
    rng = random.Random(0)
    words = sorted({word.lower() for word in re.findall(r"\b[A-Za-z]{4,9}\b", text)}) or ["none"]
    return "".join(f"{draw(rng, words)}\n" for _ in range(len(text) // 64))


def _table(text: str) -> str:
    """Return a table: name, town, day, amount, goods."""

    def row(rng: random.Random, words: list[str]) -> str:
        first, last, town, goods = rng.choices(words, k=4)
        day = f"18{rng.randrange(10, 100)}-{rng.randrange(1, 13):02}-{rng.randrange(1, 29):02}"
        name = f"{first.capitalize()} {last.capitalize()}"
        amount = f"{rng.uniform(1, 999):.2f}"
        return _SEPARATOR.join((name, town.capitalize(), day, amount, goods))

    return _draw_rows(text, row)


def _cells(table: str) -> list[list[str]]:
    """Return the cells of all rows but the last, which may be incomplete."""
    return [line.split(_SEPARATOR) for line in table.splitlines()[:-1]]


def _permute_columns(table: str) -> str:
    return "\n".join(_SEPARATOR.join(reversed(cells)) for cells in _cells(table))


def _as_sentences(table: str) -> str:
    sentence = "{1} is where {0} lived, who paid {3} for the {4} on {2}."
    return " ".join(sentence.format(*cells) for cells in _cells(table))


def _as_records(table: str) -> str:
    names = ("name", "town", "day", "amount", "goods")
    return "\n".join(json.dumps(dict(zip(names, cells, strict=True))) for cells in _cells(table))


def _log(text: str) -> str:
    """Return lines of a server's log, which differ in few fields."""

    def line(rng: random.Random, words: list[str]) -> str:
        time = f"{rng.randrange(60):02}:{rng.randrange(60):02}.{rng.randrange(1000):03}"
        path = "/".join(rng.choices(words[:: max(1, len(words) // 12)], k=2))
        status = rng.choice((200, 200, 200, 304, 404, 500))
        worker, size = rng.randrange(8), rng.randrange(100, 9999)
        return f"2031-03-01 09:{time} INFO worker-{worker} GET /{path} {status} {size} bytes"

    return _draw_rows(text, line)


def _log_again(log: str) -> str:
    """Return the same requests a day later, in the opposite order, with other sizes."""
    lines = [line.replace("03-01 09", "03-02 17") for line in log.splitlines()[:-1]]
    size = re.compile(r"\d+(?= bytes)")
    return "\n".join(size.sub(lambda old: str(int(old[0]) * 7 % 9999), x) for x in lines[::-1])


VARIATIONS = {
    "same": Variation(_same, _same),
    "capitals": Variation(_same, str.upper),
    "spelling": Variation(_same, _respell),
    "spacing": Variation(_same, _space_out),
    "line_breaks": Variation(_same, _narrow),
    "punctuation": Variation(_same, _drop_punctuation),
    "renamed_code": Variation(_code, _rename),
    "table_columns": Variation(_table, _permute_columns),
    "table_sentences": Variation(_table, _as_sentences),
    "table_records": Variation(_table, _as_records),
    "log": Variation(_log, _log_again, among_its_like=True),
}
