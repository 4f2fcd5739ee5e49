"""Session files that are damaged, loaded into a prompt under way.

Programs of `PrefillContext` change the tensors that it is made from.
"""

import tempfile
from pathlib import Path

import torch

CONFIG = "h2o,min_prefill=none,chunk_size=8,local_window=2,heavy_budget=3,recall=1,error_rows=2"
LAYERS, TOKENS, MODEL = 2, 21, "0123456789abcdef0123456789abcdef"


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


def draw_damage(draw, whole):
    content = bytearray(whole)
    for _ in range(draw.integer(1, 3)):
        content[draw.integer(0, len(whole) - 1)] = draw.integer(0, 255)
    return bytes(content[: draw.integer(0, len(whole)) if draw.chance(0.1) else None])


def check_damage(content):
    """The file is refused in one line and the prompt stays, or the prompt of the file goes on."""
    context, expected = make_context(13, 2), make_context(13, 2)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "damaged.session"
        path.write_bytes(content)
        try:
            context.load(str(path), MODEL)
            expected = make_context(TOKENS, 1)
        except ValueError as error:
            assert "\n" not in str(error), error
    assert all(map(torch.equal, go_on(context, 9, 3), go_on(expected, 9, 3)))


def test_damaged_session_files(fuzz, tmp_path):
    make_context(TOKENS, 1).save(str(tmp_path / "whole"), MODEL)
    whole = (tmp_path / "whole").read_bytes()
    check_damage(whole)
    fuzz(check_damage, draw_damage, whole)
