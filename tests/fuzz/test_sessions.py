"""Session files that are damaged, loaded into a prompt under way."""

from __future__ import annotations

import json
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
    """The file is refused in one line and the prompt stays, or the prompt goes on."""
    whole, damage = item
    context, before = make_context(13, 2), make_context(13, 2)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "damaged.session"
        path.write_bytes(damaged(whole, damage))
        try:
            context.load(str(path), MODEL)
        except ValueError as error:
            assert len(str(error).splitlines()) == 1, error
            assert context.length() == 13
            assert all(map(torch.equal, go_on(context, 9, 3), go_on(before, 9, 3)))
        else:
            go_on(context, 9, 3)
            assert context.length() == TOKENS + 9


def test_damaged_session_files(fuzz):
    whole = saved()
    assert json.loads(whole[8 : 8 + struct.unpack("<Q", whole[:8])[0]])
    check_damage((whole, Damage([], [], None, None, 0)))

    def draw_item(draw):
        return whole, draw_damage(draw, len(whole))

    fuzz(check_damage, draw_item)
