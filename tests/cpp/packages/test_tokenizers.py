"""The C++ tokenizer beside Hugging Face's: tests/cpp/runtime/test_tokenizer.cpp.

H2O_PREFILL_BOOKS names a folder of long texts.
"""

import os
import unicodedata
from pathlib import Path

import pytest
import torch
from tokenizer_families import FAMILIES, hostile_texts, make_tokenizer
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from h2o_prefill.generation import load_model, load_text
from h2o_prefill.generation.cpp_tokenizer import write_cpp_tokenizer


def with_single_marks(text):
    marks = [0, *map(unicodedata.combining, text)]
    return "".join(
        x for x, before, mark in zip(text, marks, marks[1:], strict=False) if not (before and mark)
    )


def expectations(tokenizer, texts):
    def as_bytes(text):
        return torch.tensor(list(text.encode()), dtype=torch.uint8)

    def chat(messages):
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return text, tokenizer(text, add_special_tokens=False)["input_ids"]

    messages = [{"role": "user", "content": "Hello."}]
    _, ids = chat(messages)
    answered = [*messages, {"role": "assistant", "content": "@answer@"}]
    whole, _ = chat([*answered, {"role": "user", "content": "Bye."}])
    later = tokenizer(whole.split("@answer@")[1], add_special_tokens=False)["input_ids"]
    encoded = tokenizer(texts)["input_ids"]
    return {
        "texts": [
            (
                as_bytes(x),
                torch.tensor(y, dtype=torch.int64),
                as_bytes(tokenizer.decode(y, skip_special_tokens=True)),
            )
            for x, y in zip(texts, encoded, strict=True)
        ],
        "first": torch.tensor(ids),
        "next": torch.tensor(later),
    }


def check(program, tokenizer, texts, folder):
    write_cpp_tokenizer(tokenizer, folder)
    torch.save(expectations(tokenizer, texts), folder / "texts.pt")
    environment = {"H2O_TEST_TOKENIZER": str(folder), "H2O_TEST_TEXTS": str(folder / "texts.pt")}
    done = program("tokenizer_tests", env={**os.environ, **environment})
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("family", FAMILIES)
def test_tokenizers_of_every_family(program, tmp_path, family):
    text = load_text("pydoc").text[:80_000]
    texts = [text, *hostile_texts(300)]
    if family == "qwen2":
        # OpenVINO's NFC leaves several marks of one letter in the order in which they stand.
        texts = [with_single_marks(x) for x in texts]
    check(program, make_tokenizer(family, text), texts, tmp_path)


@pytest.mark.parametrize("texts", ["hostile", "books"])
def test_the_real_model_s_tokenizer(program, tmp_path, texts):
    folder = os.environ.get("H2O_PREFILL_BOOKS")
    if texts == "books" and not folder:
        pytest.skip("needs a folder of long texts: set H2O_PREFILL_BOOKS")
    read = [x.read_text()[20_000:100_000] for x in sorted(Path(folder or "").glob("*.md"))]
    hard = hostile_texts(300, seed=1)
    check(program, load_model()[1], read if texts == "books" else hard, tmp_path)


def test_a_tokenizer_that_has_no_equal_is_refused(tmp_path):
    words = Tokenizer(models.WordLevel({"a": 0, "?": 1}, unk_token="?"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="?")
    with pytest.raises(NotImplementedError, match="OpenVINO"):
        write_cpp_tokenizer(tokenizer, tmp_path)
    assert list(tmp_path.iterdir()) == []
