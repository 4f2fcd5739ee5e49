"""Session files that are damaged, loaded into a prompt under way."""

import json
import math
import re
import struct
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

CONFIG = "h2o,min_prefill=none,chunk_size=8,local_window=2,heavy_budget=3,recall=1,error_rows=2"
LAYERS, TOKENS, MODEL = 2, 21, "0123456789abcdef0123456789abcdef"
# What a number of a header may become.
NUMBERS = (0, 1, -1, 7, 2**31, 2**32 + 1, 2**62, 2**63 - 1, 2**64, 10**30)
DTYPES = ("F64", "F32", "BF16", "I32", "I64", "U8", "", "F32\n", 5)
NAMES = ("layers.0.key", "layers.9.key", "token_ids", "", "\xff", "\u2028")
WIDTHS = {"F64": 8, "I64": 8, "F32": 4, "I32": 4}


def make_context(tokens, seed):
    classes = torch.classes.h2o_prefill
    context = classes.PrefillContext(LAYERS, 256, classes.PrefillConfig.parse(CONFIG))
    go_on(context, tokens, seed)
    return context


def go_on(context, tokens, seed):
    generator = torch.Generator().manual_seed(seed)
    context.begin(torch.randint(9, (1, tokens), generator=generator))
    found = []
    for layer in range(LAYERS):
        query = torch.randn(1, 4, tokens, 8, generator=generator)
        key, value = torch.randn(2, 1, 2, tokens, 8, generator=generator)
        found.append(context.attend(layer, query, key, value, None))
    return found


class Damage(NamedTuple):
    """Entries of the header to change, its numbers, bytes anywhere, and the length of the file."""

    # (place, what, value); whether offsets and the file's end then follow the shapes.
    entries: list[tuple[int, str, Any]]
    consistent: bool
    # Numbers and bytes: (place, value).
    numbers: list[tuple[int, int]]
    bytes_at: list[tuple[int, int]]
    header_bytes: int | None
    keep: int | None
    more: int
    # Whether the checksum is checked.
    verify: bool = True


def draw_damage(draw, size):
    values = {
        "shape": lambda: [draw.choice(NUMBERS) for _ in range(draw.integer(0, 5))],
        **dict.fromkeys(("begin", "end"), lambda: draw.choice(NUMBERS)),
        **{"dtype": lambda: draw.choice(DTYPES), "name": lambda: draw.choice(NAMES)},
        "nested": lambda: draw.choice((3, 99_999)),
        **dict.fromkeys(("drop", "twice"), lambda: None),
    }
    kinds = [draw.choice(list(values)) for _ in range(draw.integer(0, 3))]
    header = draw.chance(0.7)
    places = [draw.integer(0, 900 if header else size - 1) for _ in range(draw.integer(0, 3))]
    return Damage(
        entries=[(draw.integer(0, 99), kind, values[kind]()) for kind in kinds],
        consistent=draw.chance(0.6),
        numbers=[(draw.integer(0, 99), draw.choice(NUMBERS)) for _ in range(draw.integer(0, 2))],
        bytes_at=[(place, draw.integer(0, 255)) for place in places],
        header_bytes=draw.choice(NUMBERS[:-2]) if draw.chance(0.1) else None,
        keep=draw.integer(0, size) if draw.chance(0.1) else None,
        more=draw.integer(0, 9) if draw.chance(0.1) else 0,
        verify=draw.chance(0.5),
    )


def damaged(whole, damage):
    (length,) = struct.unpack("<Q", whole[:8])
    text, rest = whole[8 : 8 + length], whole[8 + length :]
    if damage.entries:
        text, rest = with_entries(json.loads(text), rest, damage)
    for index, number in damage.numbers:
        places = list(re.finditer(rb"\d+", text))
        place = places[index % len(places)]
        text = text[: place.start()] + str(number).encode() + text[place.end() :]
    length = len(text) if damage.header_bytes is None else damage.header_bytes
    content = bytearray(struct.pack("<Q", length % 2**64) + text + rest)
    for place, byte in damage.bytes_at:
        content[place % len(content)] = byte
    return bytes(content[: damage.keep]) + bytes(damage.more)


def with_entries(header, rest, damage):
    """Change entries of tensors in the header."""
    metadata, entries, end = header.pop("__metadata__"), list(header.items()), 0
    for index, what, value in damage.entries:
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
    for _, entry in entries if damage.consistent else ():
        size = math.prod(entry["shape"]) * WIDTHS.get(entry["dtype"], 2)
        entry["data_offsets"] = [end, end + size]
        end += size
    if damage.consistent and 0 <= end <= 1 << 20:
        rest = rest[:end].ljust(end, b"\0")
    # Not json.dumps of a dictionary, which would have every name once.
    pairs = [("__metadata__", metadata), *entries]
    texts = [f"{as_json(name)}:{as_json(value)}" for name, value in pairs]
    text = f"{{{','.join(texts)}}}".encode(errors="replace")
    return text + b" " * (-len(text) % 8), rest


def as_json(value):
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False)


def check_damage(item):
    """The file is refused in one line and the prompt stays, or the prompt of the file goes on."""
    whole, damage = item
    content, context, before = damaged(whole, damage), make_context(13, 2), make_context(13, 2)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "damaged.session"
        path.write_bytes(content)
        try:
            context.load(str(path), MODEL, damage.verify)
        except ValueError as error:
            assert "\n" not in str(error), error
            assert context.length() == 13
            assert all(map(torch.equal, go_on(context, 9, 3), go_on(before, 9, 3)))
        else:
            if damage.verify:  # what was read is what the file says
                context.save(str(path), MODEL)
                assert path.read_bytes() == content
            found = go_on(context, 9, 3)
            assert context.length() == TOKENS + 9
            if content == whole:
                assert all(map(torch.equal, found, go_on(make_context(TOKENS, 1), 9, 3)))


def test_damaged_session_files(fuzz, tmp_path):
    make_context(TOKENS, 1).save(str(tmp_path / "whole.session"), MODEL)
    whole = (tmp_path / "whole.session").read_bytes()
    none = Damage([], True, [], [], None, None, 0)
    assert damaged(whole, none) == whole
    # Without a change of any entry the header is written as it was.
    (length,) = struct.unpack("<Q", whole[:8])
    text, rest = whole[8 : 8 + length], whole[8 + length :]
    assert with_entries(json.loads(text), rest, none) == (text, rest)
    check_damage((whole, none))
    # A tensor without elements whose strides do not fit.
    check_damage((whole, none._replace(entries=[(0, "shape", [0, 10**17, 10**17])])))
    fuzz(check_damage, lambda draw: (whole, draw_damage(draw, len(whole))))
