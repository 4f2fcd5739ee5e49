"""Session files that are damaged, loaded into a prompt under way."""

import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import torch

CONFIG = "h2o,min_prefill=none,chunk_size=8,local_window=2,heavy_budget=3,recall=1,error_rows=2"
LAYERS, TOKENS, MODEL = 2, 21, "0123456789abcdef0123456789abcdef"
# What a number of a header may become.
NUMBERS = (0, 1, -1, 2, 7, 21, 22, 2**31, 2**32 + 1, 2**62, 2**63 - 1)
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.int32, torch.int64, torch.uint8)


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
    """Values of the tuple to change, then bytes of the file, and what is kept of it."""

    values: list[tuple[int, str, Any]]  # (place, what, value)
    bytes_at: list[tuple[int, int]]
    keep: int | None


def draw_damage(draw, size):
    values = {
        "number": lambda: (draw.integer(0, 99), draw.choice(NUMBERS)),
        "dtype": lambda: draw.choice(DTYPES),
        "narrow": lambda: (draw.integer(0, 3), draw.integer(0, 4)),
        "value": lambda: draw.choice((None, 5, 2**62, "", "h2o", MODEL, torch.zeros(()))),
        **dict.fromkeys(("drop", "twice"), lambda: None),
    }
    kinds = [draw.choice(list(values)) for _ in range(draw.integer(0, 3))]
    return Damage(
        values=[(draw.integer(0, 99), kind, values[kind]()) for kind in kinds],
        bytes_at=[
            (draw.integer(0, size - 1), draw.integer(0, 255)) for _ in range(draw.integer(0, 2))
        ],
        keep=draw.integer(0, size) if draw.chance(0.1) else None,
    )


def write_damaged(path, whole, damage):
    values = list(torch.load(whole))
    for index, what, value in damage.values:
        place = index % len(values) if values else 0
        x = values[place] if values else None
        if what == "value" and values:
            values[place] = value
        elif what == "drop":
            del values[place : place + 1]
        elif what == "twice":
            values[place:place] = values[place : place + 1]
        elif torch.is_tensor(x) and what == "dtype":
            values[place] = x.to(value)
        elif torch.is_tensor(x) and what == "narrow" and x.dim() > value[0]:
            values[place] = x.narrow(value[0], 0, min(value[1], x.shape[value[0]])).clone()
        elif torch.is_tensor(x) and what == "number" and x.numel():
            number = value[1] if x.dtype == torch.int64 else value[1] % 127
            x.view(-1)[value[0] % x.numel()] = number
    torch.save(tuple(values), path)
    content = bytearray(path.read_bytes())
    for place, byte in damage.bytes_at:
        content[place % len(content)] = byte
    path.write_bytes(bytes(content[: damage.keep]))


def check_damage(item):
    """The file is refused in one line and the prompt stays, or the prompt of the file goes on."""
    whole, damage = item
    context, before = make_context(13, 2), make_context(13, 2)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "damaged.session"
        write_damaged(path, whole, damage)
        try:
            context.load(str(path), MODEL)
        except ValueError as error:
            assert "\n" not in str(error), error
            assert context.length() == 13
            assert all(map(torch.equal, go_on(context, 9, 3), go_on(before, 9, 3)))
            return
    try:
        found = go_on(context, 9, 3)
    except ValueError:  # another head dim is found where keys meet
        assert damage.values
        return
    if not damage.values:
        assert all(map(torch.equal, found, go_on(make_context(TOKENS, 1), 9, 3)))


def test_damaged_session_files(fuzz, tmp_path):
    whole = tmp_path / "whole.session"
    make_context(TOKENS, 1).save(str(whole), MODEL)
    check_damage((whole, Damage([], [], None)))
    fuzz(check_damage, lambda draw: (whole, draw_damage(draw, whole.stat().st_size)))
