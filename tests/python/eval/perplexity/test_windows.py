"""Windows of a text and the rows that are scored."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from h2o_prefill.eval.perplexity.windows import (
    first_token,
    parse_windows,
    scored_rows,
    select_windows,
)


def test_scored_rows() -> None:
    assert scored_rows("gptq", 8) == range(0, 7)
    # llama.cpp: targets n/2 + 1 .. n - 1, which are n - n/2 - 1 of them
    assert scored_rows("llamacpp", 8) == range(4, 7)
    assert len(scored_rows("llamacpp", 512)) == 512 - 256 - 1
    with pytest.raises(ValueError, match=r"protocol must be one of .*got 'other'"):
        scored_rows("other", 8)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0:6", (0, 6)), ("2:3", (2, 3)), (":4", (0, 4)), ("3:", (3, None)), (":", (0, None))],
)
def test_parse_windows(text: str, expected: tuple[int, int | None]) -> None:
    assert parse_windows(text) == expected


@pytest.mark.parametrize("text", ["", "6", "a:b", "-1:2", "3:3", "4:2", "0:2:1", "0.5:2"])
def test_parse_windows_refuses(text: str) -> None:
    with pytest.raises(ValueError, match="windows must be a slice like 0:6"):
        parse_windows(text)


def test_select_windows_drops_the_rest() -> None:
    selected, windows = select_windows(torch.arange(35), 10, "1:")
    assert selected == range(1, 3)
    assert windows.tolist() == [list(range(10, 20)), list(range(20, 30))]


@pytest.mark.parametrize(
    ("tokens", "windows", "message"),
    [
        (9, "0:1", "text must hold at least one window of 10 tokens, got 9"),
        (0, "0:1", "text must hold at least one window of 10 tokens, got 0"),
        (35, "0:4", "windows must be a slice within 0:3"),
        (35, "3:", "windows must be a slice within 0:3"),
    ],
)
def test_select_windows_refuses(tokens: int, windows: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        select_windows(torch.arange(tokens), 10, windows)


def test_first_token_is_bos_only_where_llama_cpp_would_add_it(tiny: ModuleType) -> None:
    with_bos, without = tiny.make_tokenizer(add_bos=True), tiny.make_tokenizer()
    assert first_token(with_bos, "llamacpp") == with_bos.bos_token_id
    assert first_token(without, "llamacpp") is None
    assert first_token(with_bos, "gptq") is None
    assert first_token(None, "llamacpp") is None
