"""Session files that are damaged, loaded into a prompt under way."""

from __future__ import annotations

import json
import math
import re
import struct
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from random_calls.draw import Draw

CONFIG = "h2o,chunk_size=8,local_window=2,heavy_budget=3,recall=1,recall_block=4,error_rows=2"
LAYERS, TOKENS, MODEL = 2, 21, "0123456789abcdef0123456789abcdef"
# What a number of a header may become.
NUMBERS = (0, 1, -1, 7, 2**31, 2**32 + 1, 2**62, 2**63 - 1, 2**64, 10**30)


def make_context(tokens: int, seed: int) -> Any:
    classes = torch.classes.h2o_prefill
    context = classes.PrefillContext(LAYERS, 256, classes.PrefillConfig.parse(CONFIG))
    go_on(context, tokens, seed)
    return context


def go_on(context: Any, tokens: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    context.begin(torch.randint(9, (1, tokens), generator=generator))
    found = []
    for layer in range(LAYERS):
        query = torch.randn(1, 4, tokens, 8, generator=generator)
        key, value = torch.randn(2, 1, 2, tokens, 8, generator=generator)
        found.append(context.attend(layer, query, key, value, None))
    return found


def saved() -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "whole.session"
        make_context(TOKENS, 1).save(str(path), MODEL)
        return path.read_bytes()


class Damage(NamedTuple):
    """Bytes to write at places, numbers of the header to replace, and how long the file is then."""

    bytes_at: list[tuple[int, int]]
    numbers: list[tuple[int, int]]
    header_bytes: int | None
    keep: int | None
    more: int


def draw_damage(draw: Draw, size: int) -> Damage:
    header = draw.chance(0.7)
    return Damage(
        bytes_at=[
            (draw.integer(0, 900 if header else size - 1), draw.integer(0, 255))
            for _ in range(draw.integer(0, 3))
        ],
        numbers=[(draw.integer(0, 99), draw.choice(NUMBERS)) for _ in range(draw.integer(0, 2))],
        header_bytes=draw.choice(NUMBERS[:-2]) if draw.chance(0.1) else None,
        keep=draw.integer(0, size) if draw.chance(0.1) else None,
        more=draw.integer(0, 9) if draw.chance(0.1) else 0,
    )


def damaged(whole: bytes, damage: Damage) -> bytes:
    (length,) = struct.unpack("<Q", whole[:8])
    text, rest = whole[8 : 8 + length], whole[8 + length :]
    for index, number in damage.numbers:
        places = list(re.finditer(rb"\d+", text))
        place = places[index % len(places)]
        text = text[: place.start()] + str(number).encode() + text[place.end() :]
    length = len(text) if damage.header_bytes is None else damage.header_bytes
    content = bytearray(struct.pack("<Q", length % 2**64) + text + rest)
    for place, byte in damage.bytes_at:
        content[place % len(content)] = byte
    return bytes(content[: damage.keep]) + bytes(damage.more)


def check_damage(item: tuple[bytes, Damage]) -> None:
    check_file(damaged(*item), item[0])


def check_file(content: bytes, whole: bytes) -> None:
    """The file is refused in one line and the prompt stays, or the prompt of the file goes on."""
    context, before = make_context(13, 2), make_context(13, 2)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "damaged.session"
        path.write_bytes(content)
        try:
            context.load(str(path), MODEL)
        except ValueError as error:
            assert "\n" not in str(error), error
            assert context.length() == 13
            assert all(map(torch.equal, go_on(context, 9, 3), go_on(before, 9, 3)))
        else:
            # What was read is what the file says.
            context.save(str(path), MODEL)
            assert path.read_bytes() == content
            found = go_on(context, 9, 3)
            assert context.length() == TOKENS + 9
            if content == whole:
                assert all(map(torch.equal, found, go_on(make_context(TOKENS, 1), 9, 3)))


def test_damaged_session_files(fuzz):
    whole = saved()
    assert json.loads(whole[8 : 8 + struct.unpack("<Q", whole[:8])[0]])
    check_damage((whole, Damage([], [], None, None, 0)))

    def draw_item(draw):
        return whole, draw_damage(draw, len(whole))

    fuzz(check_damage, draw_item)


class Change(NamedTuple):
    """One change of the entry of a tensor in the header."""

    index: int
    what: str
    value: Any


def draw_change(draw: Draw) -> Change:
    what = draw.choice(("shape", "begin", "end", "dtype", "name", "drop", "twice", "nested"))
    values: dict[str, Any] = {
        "shape": [draw.choice(NUMBERS) for _ in range(draw.integer(0, 5))],
        "begin": draw.choice(NUMBERS),
        "end": draw.choice(NUMBERS),
        "dtype": draw.choice(("F64", "F32", "BF16", "I32", "I64", "U8", "", "F32\n", 5)),
        "name": draw.choice(("layers.0.key", "layers.9.key", "token_ids", "", "\xff", "\u2028")),
        "nested": draw.choice((3, 99_999)),
    }
    return Change(draw.integer(0, 99), what, values.get(what))


class Changed(NamedTuple):
    """Changes of the header, and whether offsets and the file's end then follow the shapes."""

    changes: list[Change]
    consistent: bool
    encoding: str


def draw_changed(draw: Draw) -> Changed:
    changes = [draw_change(draw) for _ in range(draw.integer(1, 3))]
    return Changed(changes, draw.chance(0.6), draw.choice(("utf-8", "latin-1")))


def size_of(entry: dict[str, Any]) -> int:
    widths = {"F64": 8, "I64": 8, "F32": 4, "I32": 4}
    return math.prod(entry["shape"]) * widths.get(entry["dtype"], 2)


def changed(whole: bytes, how: Changed) -> bytes:
    (length,) = struct.unpack("<Q", whole[:8])
    header = json.loads(whole[8 : 8 + length])
    metadata, entries, rest = header.pop("__metadata__"), list(header.items()), whole[8 + length :]
    for index, what, value in how.changes:
        if not entries:
            break
        place = index % len(entries)
        name, entry = entries[place]
        entry = {**entry, "data_offsets": list(entry["data_offsets"])}
        if what in ("begin", "end"):
            entry["data_offsets"][what == "end"] = value
        elif what in ("shape", "dtype"):
            entry[what] = value
        entries[place] = (value if what == "name" else name, entry)
        if what == "drop":
            del entries[place]
        elif what == "twice":
            entries.append(entries[place])
        elif what == "nested":
            metadata = {key: "[" * value for key in metadata}
    end = 0
    for _, entry in entries if how.consistent else ():
        size = size_of(entry)
        entry["data_offsets"] = [end, end + size]
        end += size
    if how.consistent and 0 <= end <= 1 << 20:
        rest = rest[:end].ljust(end, b"\0")
    # Not json.dumps of a dictionary, which would have every name once.
    texts = [f"{json.dumps(k, ensure_ascii=False)}:{as_json(v)}" for k, v in entries]
    text = f'{{"__metadata__":{as_json(metadata)}{"".join("," + x for x in texts)}}}'
    content = text.encode(how.encoding, errors="replace")
    content += b" " * (-len(content) % 8)
    return struct.pack("<Q", len(content)) + content + rest


def as_json(value: Any) -> str:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def check_changed(item: tuple[bytes, Changed]) -> None:
    check_file(changed(*item), item[0])


def test_changed_headers_of_session_files(fuzz):
    whole = saved()
    assert changed(whole, Changed([], True, "utf-8")) == whole
    # A tensor without elements whose strides do not fit.
    large = Change(0, "shape", [0, 10**17, 10**17])
    check_changed((whole, Changed([large], True, "utf-8")))
    fuzz(check_changed, lambda draw: (whole, draw_changed(draw)))
