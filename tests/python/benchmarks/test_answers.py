"""Answers after dense and after sparse prefill: prompts, and what is compared."""

import pytest

TEXT = "A quick brown fox did jump over it. " * 50
EXACT, SMALL = "h2o,local_window=256,heavy_budget=256", "h2o,local_window=4,heavy_budget=4"


@pytest.mark.filterwarnings("ignore:the memory set")
@pytest.mark.parametrize("question", ["And?", ""])
def test_rows_of_the_benchmark(run, tiny, model, model_folder, tmp_path, question):
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    words = ("--model", model_folder, "--text-file", text, "--prompts", 3, "--new-tokens", 6)
    variants = ("--variant", EXACT, "--variant", SMALL, "--question", question)
    _, report = run("answers", *words, *variants)
    rows = report["results"]
    assert [row["begin"] for row in rows[::2]] == [0, (1800 - 256) // 2, 1800 - 256]
    for row in rows:
        assert row["equal"] == (row["answers"]["dense"] == row["answers"][row["variant"]])
        # The most likely token of the dense run is no less likely than another one.
        assert row["equal"] or (0 <= row["parts_at"] < 6 and row["gap"] > 0)
    assert all(row["equal"] for row in rows[::2]) and not all(row["equal"] for row in rows)
    if not question:
        tokenizer = tiny.make_tokenizer()
        ids = tokenizer(TEXT, return_tensors="pt")["input_ids"][:, :256]
        made = model.generate(ids, max_new_tokens=6, do_sample=False)[0, 256:]
        assert rows[0]["answers"]["dense"] == tokenizer.decode(made)
