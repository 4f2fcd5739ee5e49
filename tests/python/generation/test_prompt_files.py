"""Answers to the prompts of a file: as each prompt gets alone, and none twice."""

import itertools
import json
import sys

import pytest
import torch

import h2o_prefill
from h2o_prefill.config import PrefillConfig
from h2o_prefill.generation import prompt_files
from h2o_prefill.generation.prompt_files import answer_prompts, read_prompts

pytest.importorskip("transformers")

CONFIG = PrefillConfig(chunk_size=16, local_window=4, heavy_budget=4, error_rows=2)
NEW = 6


@pytest.fixture
def prompts(tiny):
    return {f"p{i}": f"{i} {tiny.SENTENCE * (1 + i % 4)}"[: 150 - i] for i in range(8)} | {9: "ab"}


@pytest.fixture
def answer(tiny_model, tiny_tokenizer, prompts, tmp_path):
    def run(changed=None, **options):
        options = {"batch_tokens": 400, "max_new_tokens": NEW, "config": CONFIG, **options}
        model = options.pop("model", tiny_model)
        given = prompts if changed is None else changed
        return answer_prompts(model, tiny_tokenizer, given, tmp_path / "o.jsonl", **options)

    return run


def _read(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("ends", [False, True])
def test_each_prompt_is_answered_as_if_alone(
    answer, prompts, tiny_model, tiny_tokenizer, tmp_path, ends
):
    alone = {}
    for _ in range(2 if ends else 1):
        for name, text in prompts.items():
            ids = tiny_tokenizer(text, return_tensors="pt", verbose=False)["input_ids"]
            with h2o_prefill.enable(tiny_model, CONFIG) as handle, torch.no_grad():
                options = {"max_new_tokens": NEW, "do_sample": False, "pad_token_id": 0}
                new = tiny_model.generate(ids, **options)[0, ids.shape[1] :]
                kl = handle.report().estimated_kl or [None]
            alone[name] = ids.shape[1], new.tolist(), kl[0]
        if ends:
            # What one of them says third ends all answers.
            tiny_model.generation_config.eos_token_id = [alone["p3"][1][2]]
    found = answer()
    rows = _read(tmp_path / "o.jsonl")
    assert rows == found.rows and [row["id"] for row in rows] == list(prompts)
    assert not found.failed and found.reused == 0
    for row in rows:
        length, new, kl = alone[row["id"]]
        assert row["answer"] == tiny_tokenizer.decode(new, skip_special_tokens=True)
        assert (row["prompt_tokens"], row["new_tokens"]) == (length, len(new))
        ended = ends and new[-1] in tiny_model.generation_config.eos_token_id
        assert row["finish"] == ("stop" if ended else "length")
        assert row["estimated_kl"] == (None if kl is None else pytest.approx(kl, rel=1e-3))
    assert {row["finish"] for row in rows} >= ({"stop"} if ends else {"length"})


def test_a_file_goes_on_after_a_cut_line(answer, prompts, tmp_path, monkeypatch):
    path = tmp_path / "o.jsonl"
    whole = answer().rows
    other = {"id": "other", "answer": "kept", "key": "x"}
    lines = [json.dumps(row, ensure_ascii=False) for row in (other, *whole[::-1])]
    path.write_text("\n".join([*lines[:4], lines[4][:25]]))
    asked = []
    generate = prompt_files._generate

    def count(held, config, new, ids):
        asked.append(len(ids))
        return generate(held, config, new, ids)

    monkeypatch.setattr(prompt_files, "_generate", count)
    found = answer()
    assert found.reused == 3 and sum(asked) == len(prompts) - 3
    assert found.rows == whole and _read(path) == [*whole, other]
    assert answer().reused == len(prompts) and sum(asked) == len(prompts) - 3
    for changes in ({"max_new_tokens": 7}, {"config": CONFIG.replace(sink_tokens=1)}):
        with pytest.raises(ValueError, match="under the id 'p0' to another prompt, or of another"):
            answer(**changes)
    with pytest.raises(ValueError, match="under the id 'p1'"):
        answer({"p1": "other words"})


@pytest.mark.parametrize(
    ("held", "message"),
    [
        ('{"prompt": "mine"}\n', "output line 1 must be an answer"),
        ("mine\n", "output line 1 must be JSON"),
        ("[" * 100_000 + "\n", "output line 1 must be JSON"),
        ("mine", "output must hold answers of this command alone: its last line is not"),
        ('{"prompt": "mine', "its last line is not of this command"),
        ('{"id": 1, "prompt": "mine"}', "its last line is not of this command"),
        ('{"id": 1, "answer": "", "key": "x"}\nmine', "its last line is not of this command"),
    ],
)
def test_a_file_of_something_else_stays(answer, tmp_path, held, message):
    path = tmp_path / "o.jsonl"
    path.write_text(held)
    with pytest.raises(ValueError, match=message):
        answer()
    assert path.read_text() == held


def test_a_prompt_that_cannot_be_answered_has_an_error(
    answer, prompts, tiny, tmp_path, monkeypatch
):
    given = {"long": tiny.SENTENCE * 20, **prompts, "empty": " ", "half": "a\ud800"}
    generate = prompt_files._generate

    def no_memory(held, config, new, ids):
        if any(len(one) == len(prompts["p3"]) for one in ids):
            raise RuntimeError("no memory\nand a backtrace")
        return generate(held, config, new, ids)

    with monkeypatch.context() as patch:
        patch.setattr(prompt_files, "_generate", no_memory)
        found = answer(given)
    errors = {row["id"]: row["error"] for row in found.failed}
    assert errors == {
        "long": "prompt and new tokens must be <= 512, the longest that the model takes, got 766",
        "p3": "no memory",
        "empty": "prompt must not be empty",
        "half": r"prompt must be UTF-8 text, got '\ud800' as character 2",
    }
    again = answer(given)
    assert [row["id"] for row in again.failed] == ["long", "empty", "half"] and again.reused == 8
    assert [row["id"] for row in _read(tmp_path / "o.jsonl")] == list(given)


def test_batches_hold_similar_lengths_and_so_many_tokens():
    lengths = {i: 10 + 37 * i % 300 for i in range(40)} | {"long": 2000}
    batches = prompt_files._batches(lengths, 20, 1000)
    assert sorted(map(str, itertools.chain(*batches))) == sorted(map(str, lengths))
    assert batches[0] == ["long"]
    for batch in batches[1:]:
        longest = max(lengths[name] for name in batch)
        assert len(batch) * (longest + 20) <= 1000
        assert min(lengths[name] for name in batch) >= 0.75 * longest
    assert [max(lengths[name] for name in batch) for batch in batches] == sorted(
        (max(lengths[name] for name in batch) for batch in batches), reverse=True
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\n{"prompt": ', "in line 2 must be JSON"),
        ('{"prompt": "a"}\n' + "[" * 100_000, "in line 2 must be JSON: maximum recursion"),
        ('{"prompt": "a"}\n\n["b"]', "in line 3 must be a JSON object"),
        ('{"text": "a"}', 'in line 1 must have a text as "prompt", got None'),
        ('{"prompt": "a", "id": 1.5}', 'in line 1: "id" must be a text or int, got 1.5'),
        (
            '{"prompt": "a", "id": 2}\n{"prompt": "b"}',
            "in line 2 must have an id of its own, got 2",
        ),
        ("\n", "in must hold text"),
    ],
)
def test_wrong_input_names_its_line(tmp_path, text, message):
    (tmp_path / "p.jsonl").write_text(text)
    with pytest.raises(ValueError, match=message):
        read_prompts(tmp_path / "p.jsonl", "in")


def test_ids_default_to_lines_and_texts_may_hold_anything(answer, tmp_path):
    (tmp_path / "p.jsonl").write_text(
        '\ufeff{"prompt": "a\u2028b", "id": "x\\ud800"}\n\n{"prompt": "c", "more": 1}\n'
    )
    prompts = read_prompts(tmp_path / "p.jsonl")
    assert prompts == {"x\ud800": "a\u2028b", 3: "c"}
    assert not answer(prompts).failed and answer(prompts).reused == 2


@pytest.fixture
def generate(tiny, prompts, tmp_path):
    """Run the command line on the prompts; options say where."""
    testing = pytest.importorskip("typer.testing")
    from h2o_prefill.cli.app import app

    lines = [json.dumps({"id": name, "prompt": text}) for name, text in prompts.items()]
    (tmp_path / "p.jsonl").write_text("\n".join(lines))
    command = ["generate", "--model", str(tiny.save_model(tmp_path / "m")), "--threads", "1"]
    command += ["--preset", "h2o,chunk_size=16,local_window=4,heavy_budget=4"]
    command += ["--max-new-tokens", "5", "--batch-tokens", "500"]
    command += ["--input", str(tmp_path / "p.jsonl"), "--output"]
    return lambda *words: testing.CliRunner().invoke(app, [*command, *map(str, words)])


def test_the_command_line(generate, prompts, tmp_path, monkeypatch):
    done = generate(tmp_path / "o.jsonl")
    assert done.exit_code == 0, done.output
    assert "9 prompts, 0 of them answered before" in done.stderr
    assert [row["id"] for row in _read(tmp_path / "o.jsonl")] == list(prompts)
    monkeypatch.setitem(sys.modules, "distributed", None)
    done = generate(tmp_path / "other.jsonl", "--workers", "1")
    assert done.exit_code == 1 and done.stderr.count("\n") == 1
    assert "need Dask: pip install 'h2o_prefill[cluster]'" in done.stderr


@pytest.mark.slow
def test_the_command_line_on_a_cluster(generate, tmp_path):
    pytest.importorskip("distributed")
    here, there = tmp_path / "here.jsonl", tmp_path / "there.jsonl"
    generate(here)
    done = generate(there, "--workers", "1")
    assert done.exit_code == 0, done.output
    assert "dashboard of 1 workers: http://127.0.0.1" in done.stderr
    assert there.read_bytes() == here.read_bytes()
