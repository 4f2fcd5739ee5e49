"""Texts by name or file, and their tokens."""

import hashlib
import logging
import sys

import pytest

from h2o_prefill.generation import load_text
from h2o_prefill.generation.text import encode


def test_pydoc_is_there_and_stable():
    corpus = load_text("pydoc")
    assert corpus == load_text("pydoc") and corpus.source == "pydoc_data.topics"
    # different in every Python, about 465 thousand characters
    assert 300_000 < len(corpus.text) < 900_000


def test_a_file_is_taken_as_it_is_and_the_variable_names_wikitext2(tmp_path, monkeypatch):
    path = tmp_path / "some.txt"
    path.write_text(" = Title = \n\nwörds\n", encoding="utf-8")
    source = f"some.txt sha256:{hashlib.sha256(path.read_bytes()).hexdigest()}"
    given = load_text(text_file=path)
    assert (given.name, given.text, given.source) == ("some.txt", path.read_text("utf-8"), source)
    monkeypatch.setenv("H2O_PREFILL_WIKITEXT2", str(path))
    named = load_text("wikitext2")
    assert (named.name, named.text, named.source) == ("wikitext2", given.text, source)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())  # a byte-order mark is no text
    assert load_text(text_file=path) == given
    (tmp_path / "other.txt").write_text("a file that is given wins")
    for dataset in ("wikitext2", "pydoc"):
        assert load_text(dataset, tmp_path / "other.txt").text == "a file that is given wins"


def test_what_is_not_text_is_refused(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"dataset must be one of .*got 'c4'"):
        load_text("c4")
    wrong = {
        b" \n\n": "hold UTF-8 text",
        b"\xff": "be UTF-8",
        bytes(9): "hold UTF-8 text",
    }
    for content, message in wrong.items():
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(ValueError, match=f"text_file must {message}"):
            load_text(text_file=tmp_path / "file")
    with pytest.raises(ValueError, match="text_file must be a text file, got the folder"):
        load_text(text_file=tmp_path)
    monkeypatch.setenv("H2O_PREFILL_WIKITEXT2", str(tmp_path / "missing"))
    with pytest.raises(FileNotFoundError, match="H2O_PREFILL_WIKITEXT2: no such file"):
        load_text("wikitext2")


def test_without_a_network_the_ways_out_are_named(monkeypatch, tmp_path):
    datasets = pytest.importorskip("datasets")
    monkeypatch.delenv("H2O_PREFILL_WIKITEXT2", raising=False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path))
    ways_out = r"--text-file or H2O_PREFILL_WIKITEXT2.*--dataset pydoc"
    with pytest.raises(ValueError, match=ways_out):
        load_text("wikitext2")
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"\(.*datasets.*" + ways_out):
        load_text("wikitext2")


def test_the_hubs_rows_are_joined_by_blank_lines(monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.delenv("H2O_PREFILL_WIKITEXT2", raising=False)
    asked = []

    def load_dataset(*args, **kwargs):
        asked.append((args, kwargs))
        return {"text": ["", " = Title = \n", " words\n"]}

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    corpus = load_text("wikitext2")
    assert asked == [(("Salesforce/wikitext", "wikitext-2-raw-v1"), {"split": "test"})]
    assert corpus.text == "\n\n = Title = \n\n\n words\n"
    assert corpus.source == "Salesforce/wikitext/wikitext-2-raw-v1/test"


def test_a_text_is_tokenised_as_a_whole_without_a_warning(tiny_tokenizer, caplog):
    logging.getLogger("transformers").propagate = True
    text = "abc" * 100
    tokens = encode(tiny_tokenizer, text)
    assert tiny_tokenizer.model_max_length < 300
    assert tokens.tolist() == tiny_tokenizer.convert_tokens_to_ids(list(text))
    assert "longer than" not in caplog.text
