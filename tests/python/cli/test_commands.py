"""Every command from its arguments to its table and files."""

import json

import pytest
import torch

import h2o_prefill
from h2o_prefill.generation import load_model
from h2o_prefill.generation.prompts import encode_prompt, encode_turn
from h2o_prefill.presets import PRESETS, SPARSE_PRESETS
from h2o_prefill.session import Session

pd = pytest.importorskip("pandas")

PRESET = "h2o,chunk_size=16,local_window=4,heavy_budget=4"
SMALLEST = "h2o,chunk_size=16,local_window=4"
SMALL = "h2o,chunk_size=64,local_window=16,heavy_budget=16"
RECALL = f"{SMALL},recall=2"


@pytest.fixture
def report(run, tmp_path):
    """Run a command line that must succeed; return its JSON file and what it printed."""

    def made(*arguments):
        done = run(*arguments, "--json", tmp_path / "report.json")
        assert done.exit_code == 0, done.output
        assert "warning" not in done.output.lower() and "Loading weights" not in done.output
        assert "\u2026" not in done.stdout, "rich cut a cell off at 80 columns"
        return json.loads((tmp_path / "report.json").read_text()), done.stdout

    return made


# By command: options, what the JSON says of them, files, and numbers as the table prints them.
RUNS = {
    "compare": (
        ("--preset", f"{SMALLEST},heavy_budget=2", "--dtype", "bfloat16"),
        {"preset": f"{SMALLEST},heavy_budget=2", "heavy_budget": 2, "dtype": "bfloat16"},
        [],
        lambda x: [f"{x['runs'][2]['kl_mean']:.4f}", "text.txt, medians of 1 64 tokens"],
    ),
    "ppl": (
        ("--windows", "1:3", "--preset", f"{PRESET},recall=2"),
        {"recall": 2, "windows": [1, 2]},
        [],
        lambda x: [
            *(f"{x[name]['ppl_by_chunk'][2]:.3f}" for name in ("dense", "sparse")),
            f"{x['dense']['ppl']:.3f} {x['sparse']['ppl']:.3f}",
            f"{x['delta_percent']:+.2f}",
            f"recalled keys of a row {x['recalled_keys']:.0f}",
        ],
    ),
    "bench": (
        ("--runs", 2, "--preset", PRESET.replace("16", "12")),
        {"chunk_size": 12, "preset": PRESET.replace("16", "12")},
        [],
        lambda x: [
            *(f"{x['results'][1][name]:.2f}" for name in ("speedup", "attention_flops_ratio")),
            *(f"{x['results'][1][f'{name}_peak_bytes'] / 1e6:.1f}" for name in ("dense", "sparse")),
        ],
    ),
    "retrieve": (
        ("--preset", RECALL, "--prompts", 2, "--seed", 5),
        {"seed": 5, "dtype": "float32", "prompts_per_cell": 2},
        [],
        lambda x: [
            "needles in long.txt",
            "{log_prob_change:+.3f} ± {log_prob_stderr:.3f}".format(**x["summary"][1]),
        ],
    ),
    "visualize": (
        ("--output", "out", "--window", 1, "--preset", f"{PRESET},sink_tokens=1"),
        {"sink_tokens": 1, "window": 1, "context": 64, "dataset": "text.txt"},
        ["out/memory.png", "out/errors.png"],
        lambda x: [f"window 1 of 64 tokens, {PRESET},sink_tokens=1", " 0 0.00 %", "100.00 %"],
    ),
}


@pytest.mark.parametrize("command", RUNS)
def test_what_commands_write_and_print(report, small_commands, tmp_path, monkeypatch, command):
    monkeypatch.chdir(tmp_path)
    options, config, files, shown = RUNS[command]
    found, table = report(*small_commands[command], *options)
    assert found["config"].items() >= config.items()
    assert found["environment"]["threads"] == 1
    assert all((tmp_path / file).read_bytes().startswith(b"\x89PNG") for file in files)
    words = " ".join(table.split())
    assert [text for text in shown(found) if text not in words] == []


def test_compare_on_a_prompt_and_retrieval_that_is_kept(report, small_commands, tiny, tmp_path):
    (tmp_path / "prompt.txt").write_text(tiny.SENTENCE * 3)
    command = ("compare", *small_commands["generate"][1:3], "--max-new-tokens", 3)
    found, _ = report(*command, "--prompt-file", tmp_path / "prompt.txt", "--preset", PRESET)
    assert found["tokens"] == len(tiny.SENTENCE * 3)
    assert [run["settings"] for run in found["runs"]] == ["", "exact", PRESET]


def test_generate_prints_what_the_sparse_model_says(
    run, small_commands, tiny, model_folder, tmp_path
):
    model, tokenizer = load_model(model_folder)
    ways = {tiny.SENTENCE: "sparse", "Sphinx": "dense, since shorter than "}
    for prompt, way in ways.items():
        (tmp_path / "prompt.txt").write_text(prompt)
        done = run(*small_commands["generate"], prompt)
        read = run(*small_commands["generate"], "--prompt-file", tmp_path / "prompt.txt")
        assert done.stdout == read.stdout
        said = done.stderr.replace("\n", " ")
        assert f"prefill {len(prompt)} tokens in" in said and f"({way}" in said
        ids = tokenizer(prompt, return_tensors="pt", verbose=False)["input_ids"]
        with h2o_prefill.enable(model, PRESET):
            out = model.generate(ids, max_new_tokens=5, do_sample=False)
        new = tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True)
        assert done.stdout == new + "\n"
    measuring = run(
        *small_commands["generate"], "--preset", f"{PRESET},error_rows=2", tiny.SENTENCE
    )
    assert "(sparse, estimated KL to dense 0." in measuring.stderr.replace("\n", " ")


def test_generate_samples(run, small_commands, tiny):
    command = (*small_commands["generate"], tiny.SENTENCE)
    options = ("--temperature", "1.5", "--top-k", "20", "--top-p", "0.9", "--seed")
    drawn = [run(*command, *options, seed) for seed in ("1", "1", "2")]
    assert drawn[0].stdout == drawn[1].stdout != drawn[2].stdout


def test_generate_continues_a_session(run, refused, small_commands, tiny, model_folder, tmp_path):
    model, tokenizer = load_model(model_folder)
    file = tmp_path / "text.session"
    given = torch.empty(1, 0, dtype=torch.int64)
    with h2o_prefill.enable(model, PRESET):
        cache = h2o_prefill.ChunkedPrefillCache(config=model.config)
        for prompt in (tiny.SENTENCE * 2, "Judge!", tiny.SENTENCE):
            done = run(*small_commands["generate"], "--session", file, prompt)
            said = done.stderr.replace("\n", " ")
            after = f"after {given.shape[1]} " if given.shape[1] else ""
            assert f"prefill {len(prompt)} tokens {after}in" in said and f"wrote {file}" in said
            ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt").input_ids
            ids = torch.cat([given, ids], dim=1)
            given = model.generate(ids, past_key_values=cache, max_new_tokens=5, do_sample=False)
            with torch.no_grad():
                model(given[:, -1:], past_key_values=cache)
            answer = tokenizer.decode(given[0, ids.shape[1] :], skip_special_tokens=True)
            assert done.stdout == answer + "\n"
    assert Session.load(file).token_ids.equal(cache.token_ids)
    command = (*small_commands["generate"], "--session", file, "Judge!")
    refused(
        run(*command, "--preset", PRESET.replace("16", "32")),
        "must have the settings .*chunk_size=32",
    )
    refused(run(*command[:-2], tmp_path, "Judge!"), "--session must be a file in a folder")


def test_a_turn_goes_on_after_an_answer(tiny):
    tokenizer = tiny.make_tokenizer(add_bos=True)
    raw = encode_turn(tokenizer, "more", torch.tensor([[5]]), chat=True)
    assert tokenizer.decode(raw[0]) == "more"
    tokenizer.chat_template = (
        "system{% for m in messages %}[{{ m.role }}]{{ m.content }}<bos>{% endfor %}"
        "{% if add_generation_prompt %}[assistant]{% endif %}"
    )
    first = encode_prompt(tokenizer, "one", chat=True)
    answer = tokenizer("two", add_special_tokens=False, return_tensors="pt")["input_ids"]
    messages = [("user", "one"), ("assistant", "two"), ("user", "three")]
    whole = tokenizer.apply_chat_template(
        [{"role": role, "content": content} for role, content in messages],
        **{"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"},
    )["input_ids"]
    # An answer that the number of tokens ended lacks the end token.
    for past in (answer, torch.cat([answer, torch.tensor([[0]])], dim=1)):
        past = torch.cat([first, past], dim=1)
        turn = encode_turn(tokenizer, "three", past, chat=True)
        assert torch.cat([past, turn], dim=1).equal(whole)


def test_info_names_the_build(report):
    facts, table = report("info")
    assert facts["environment"]["library"]["version"] in table
    assert facts["command line"]["presets"] == list(PRESETS)
    for name in () if torch.cuda.is_available() else SPARSE_PRESETS:
        shortest = PRESETS[name].shortest_sparse_prompt(torch.empty(0))
        said = f"fewer than {shortest:,} tokens are dense"
        assert said in facts["shortest sparse prompt"][f"{name}, float32"]
        assert said in " ".join(table.split())


def test_ablate_writes_a_table_a_csv_file_and_a_figure(run, small_commands, tmp_path):
    csv = tmp_path / "out" / "perplexity_ablation.csv"
    given = ("--dtype", "bfloat16", "--gqa-reduce", "max", "--chunk-size", "16,40")
    done = run(*small_commands["ablate"], "--output", csv.parent, "--sink-tokens", "0,2", *given)
    assert done.exit_code == 0, done.output
    assert "warning: left out context=64 chunk_size=40" in done.stderr.replace("\n", " ")
    frame = pd.read_csv(csv)
    assert len(frame) == 4
    title = "h2o, chunk_size of 16,40, local_window of 4, heavy_budget of 0,4, sink_tokens of 0,2"
    assert f"\n{title}, gqa_reduce of max\n" in done.stdout
    assert all(preset.startswith("h2o,chunk_size=16,") for preset in frame["preset"])
    assert set(frame["dtype"]) == {"bfloat16"} and set(frame["gqa_reduce"]) == {"max"}
    lines = [line for line in done.stdout.splitlines() if " 1/" in line]
    assert len(lines) == 4
    for line, row in zip(lines, frame.to_dict(orient="records"), strict=True):
        heavy, sinks, dense, sparse = line.split()[:4]
        assert (int(heavy), int(sinks)) == (row["heavy_budget"], row["sink_tokens"])
        ppl = row["dense_ppl"], row["sparse_ppl"]
        assert (float(dense), float(sparse)) == pytest.approx(ppl, abs=6e-4)
    assert csv.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert done.stderr.split()[-4:] == ["wrote", str(csv), "wrote", str(csv.with_suffix(".png"))]
