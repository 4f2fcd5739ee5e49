"""Every command from its arguments to its table and files."""

import json
import re
from pathlib import Path

import pytest
import torch

import h2o_prefill
from h2o_prefill.cli.compare import _default_context
from h2o_prefill.cli.options import SettingsOptions
from h2o_prefill.cli.tables import ablation_table
from h2o_prefill.eval.forward import PromptForward
from h2o_prefill.generation import load_model
from h2o_prefill.generation.prompts import encode_prompt, encode_turn
from h2o_prefill.presets import PRESETS, SPARSE_PRESETS
from h2o_prefill.session import Session

pd = pytest.importorskip("pandas")

PRESET = "h2o,chunk_size=16,local_window=4,heavy_budget=4"
SMALL = "h2o,chunk_size=64,local_window=16,heavy_budget=16"
COMMANDS = (
    *("compare", "ppl", "ablate", "bench", "retrieve", "visualize"),
    *("generate", "export"),
)
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


def _row(table, name):
    (line,) = [line for line in table.splitlines() if line.strip().startswith(name)]
    return [float(number) for number in re.findall(r"[+-]?\d+\.\d+", line.replace(name, "", 1))]


def test_compare(report, small_commands, tiny, tmp_path):
    found, table = report(*small_commands["compare"])
    own, exact, sparse = found["runs"]
    assert found["tokens"] == 64 and found["config"]["preset"] == sparse["settings"] == PRESET
    assert (own["settings"], exact["settings"]) == ("", "exact")
    for run in (own, exact):
        measured = run["seconds"], run["speedup"]
        assert _row(table, run["name"])[:2] == pytest.approx(measured, abs=6e-3)
    assert f" {sparse['kl_mean']:.4f} " in table and "text.txt, medians of 1\n64 tokens" in table

    (tmp_path / "prompt.txt").write_text(tiny.SENTENCE * 3)
    command = ("compare", *small_commands["generate"][1:3], "--max-new-tokens", 3)
    given = ("--prompt-file", tmp_path / "prompt.txt", "--preset", PRESET, "--heavy-budget", 2)
    found, _ = report(*command, *given, "--dtype", "bfloat16")
    assert found["tokens"] == len(tiny.SENTENCE * 3) and found["config"]["heavy_budget"] == 2
    assert len(found["runs"][2]["all_seconds"]) == 3


def test_without_a_preset_settings_are_the_default():
    assert SettingsOptions().find() == PRESETS["recommended"]


def test_ppl(report, small_commands, tmp_path):
    found, table = report(*small_commands["ppl"], "--plot", tmp_path / "p.png")
    expected = [found["dense"]["ppl"], found["sparse"]["ppl"]]
    expected += [found["delta_percent"], found["stderr_percent"]]
    assert _row(table, "perplexity") == pytest.approx(expected, abs=5e-3)
    for chunk in range(4):
        expected = [found[name]["ppl_by_chunk"][chunk] for name in ("dense", "sparse")]
        assert _row(table, f"chunk {chunk}")[:2] == pytest.approx(expected, abs=5e-4)
    assert found["config"]["text_source"].startswith("text.txt sha256:")
    assert found["config"]["preset"] == PRESET and "recalled keys" not in table
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_options_of_ppl_reach_the_run(report, small_commands):
    found, table = report(
        *(*small_commands["ppl"], "--heavy-budget", 0, "--windows", "1:"),
        *("--dtype", "bfloat16"),
        *("--preset", f"{PRESET},sink_tokens=2,recall=2"),
    )
    config = found["config"]
    assert (config["sink_tokens"], config["heavy_budget"]) == (2, 0)
    assert config["dtype"] == "bfloat16"
    assert config["windows"][0] == 1 and len(config["windows"]) > 1
    assert found["environment"]["threads"] == 1
    (line,) = (line for line in table.splitlines() if "recalled keys of a row" in line)
    assert line.split()[-1] == f"{found['recalled_keys']:.0f}" and found["recalled_keys"] > 0


def test_bench(report, small_commands, tmp_path):
    folder = tmp_path / "new" / "results"
    options = ("--runs", 2, "--dtype", "bfloat16", "--chunk-size", 12, "--output", folder)
    found, table = report(*small_commands["bench"], *options)
    preset = PRESET.replace("16", "12")
    expected = {"chunk_size": 12, "dtype": "bfloat16", "preset": preset}
    assert found["config"].items() >= expected.items() and found["environment"]["threads"] == 1
    names = ("speedup", "speedup_min", "speedup_max", "attention_flops_ratio")
    for row, length in zip(found["results"], (16, 48), strict=True):
        assert (row["seq_length"], row["num_runs"]) == (length, 2)
        expected = [row[name] for name in names]
        shown = map(abs, _row(table, f"{length} ")[-4:])  # a range has a dash
        assert list(shown) == pytest.approx(expected, abs=5e-3)
    figures = sorted(folder.iterdir())
    assert [path.name for path in figures] == ["memory_profile.png", "throughput_comparison.png"]
    assert all(row["sparse_peak_bytes"] > row["kv_cache_bytes"] > 0 for row in found["memory"])


def test_retrieve(report, small_commands, tmp_path):
    found, table = report(
        *(*small_commands["retrieve"], "--preset", RECALL, "--prompts", 2, "--seed", 5),
        *("--plot", tmp_path / "p.png", "--question", "first", "--keep", tmp_path / "kept.jsonl"),
    )
    assert len((tmp_path / "kept.jsonl").read_text().splitlines()) == 4
    rows = [(row["variant"], row["prompts"], row["kept"]) for row in found["summary"]]
    assert rows == [(name, 4, None) for name in ("dense", SMALL, RECALL)]
    assert [prompt["depth"] for prompt in found["prompts"]] == [0, 0, 100, 100]
    expected = {"question": "first", "seed": 5, "dtype": "float32", "prompts_per_cell": 2}
    assert found["config"].items() >= expected.items()
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")
    assert "needles in long.txt, question first" in table
    small = found["summary"][1]
    change = small["log_prob_change"], small["log_prob_stderr"]
    assert " {:+.3f} ± {:.3f} ".format(*change) in table and change[0] != 0


def test_visualize(report, small_commands, tmp_path):
    options = ("--output", tmp_path / "out", "--window", 1, "--sink-tokens", 1, "--format", "svg")
    found, printed = report(*small_commands["visualize"], *options)
    *lines, memory, errors, _ = printed.split("\n")
    figures = [memory, errors]
    assert figures == [str(tmp_path / "out" / f"{name}.svg") for name in ("memory", "errors")]
    assert all(Path(path).read_bytes().startswith(b"<?xml") for path in figures)
    assert "window 1 of 64 tokens, h2o S=16 L=4 H=4 K=1" in " ".join(printed.split())

    rows = {line.split()[0]: line.split() for line in lines if line.strip()}
    assert all(str(chunk) in rows for chunk in range(4))  # a row a chunk
    # Error 0, and all of the mass: the first chunk is exact.
    assert rows["0"][1:3] == ["0.00", "%"] and rows["0"][6:8] == ["100.00", "%"]
    assert float(rows["1"][1]) > 0 and rows["1"][-1] == "-" and 0 <= float(rows["2"][-1]) <= 1
    config = {"sink_tokens": 1, "window": 1, "context": 64, "dataset": "text.txt"}
    assert found["config"].items() >= config.items() and len(found["by_layer"]) == 2


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


def test_generate_samples_and_cuts_long_prompts(run, small_commands, tiny):
    command = (*small_commands["generate"], tiny.SENTENCE)
    drawn = [
        run(*command, "--temperature", "1.5", "--top-k", "20", "--top-p", "0.9", "--seed", seed)
        for seed in ("1", "1", "2")
    ]
    assert drawn[0].stdout == drawn[1].stdout != drawn[2].stdout
    cut = run(*command, "--max-prompt-tokens", "30")
    said = cut.stderr.replace("\n", " ")
    assert f"{len(tiny.SENTENCE)} tokens are cut to 30" in said and "prefill 30 tokens" in said
    assert run(*command, "--max-prompt-tokens", "300").stdout == run(*command).stdout


def test_generate_continues_a_session(run, refused, small_commands, tiny, model_folder, tmp_path):
    model, tokenizer = load_model(model_folder)
    file = tmp_path / "text.session"
    prompts = (tiny.SENTENCE * 2, "Judge!", tiny.SENTENCE)
    given = []
    with h2o_prefill.enable(model, PRESET):
        cache = h2o_prefill.ChunkedPrefillCache(config=model.config)
    for prompt in prompts:
        done = run(*small_commands["generate"], "--session", file, prompt)
        assert done.exit_code == 0, done.output
        said = done.stderr.replace("\n", " ")
        after = f"after {len(given)} " if given else ""
        assert f"prefill {len(prompt)} tokens {after}in" in said and f"wrote {file}" in said
        given += tokenizer(prompt, add_special_tokens=False, verbose=False)["input_ids"]
        with h2o_prefill.enable(model, PRESET), torch.no_grad():
            out = model.generate(
                torch.tensor([given]), past_key_values=cache, max_new_tokens=5, do_sample=False
            )
            model(out[:, -1:], past_key_values=cache)
        assert (
            done.stdout == tokenizer.decode(out[0, len(given) :], skip_special_tokens=True) + "\n"
        )
        given = out[0].tolist()
    assert Session.load(file).token_ids.tolist() == cache.token_ids.tolist()
    whole = file.read_bytes()
    command = (*small_commands["generate"], "--session", file, "Judge!")
    refused(run(*command, "--chunk-size", 32), "must have the settings .*chunk_size=32")
    refused(run(*command[:-2], tmp_path, "Judge!"), "--session must be a file in a folder")
    assert file.read_bytes() == whole


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
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )["input_ids"]
    # An answer that the number of tokens ended lacks the end token.
    for past in (answer, torch.cat([answer, torch.tensor([[0]])], dim=1)):
        past = torch.cat([first, past], dim=1)
        turn = encode_turn(tokenizer, "three", past, chat=True)
        assert torch.cat([past, turn], dim=1).equal(whole)


def test_compare_takes_a_long_text_where_that_is_fast(tiny, monkeypatch):
    model = tiny.make_model(max_position_embeddings=4096)
    seconds = [1.9, 2.1, 0.0]
    monkeypatch.setattr(PromptForward, "prefill", lambda self, ids: seconds.pop(0))
    lengths = [_default_context(model, torch.arange(n), 3) for n in (8000, 8000, 7999)]
    assert lengths == [8000, 4096, 4096]


def test_info_names_the_build(report):
    facts, table = report("info")
    assert facts["environment"]["library"]["version"] in table
    assert "chunked_sparse_attention" in table
    assert facts["command line"]["presets"] == list(PRESETS)
    if not torch.cuda.is_available():
        found = facts["shortest sparse prompt"]
        assert list(found) == [f"{x}, {y}" for y in ("float32", "bfloat16") for x in SPARSE_PRESETS]
        for name in SPARSE_PRESETS:
            shortest = PRESETS[name].shortest_sparse_prompt(torch.empty(0))
            said = f"fewer than {shortest:,} tokens are dense"
            assert said in found[f"{name}, float32"] and said in " ".join(table.split())


@pytest.fixture
def ablate(run, small_commands, tmp_path):
    """Run `ablate` on the small model; later arguments win over these."""
    given = (*small_commands["ablate"], "--output", tmp_path / "out")
    return lambda *arguments: run(*given, *arguments)


@pytest.fixture
def csv(tmp_path):
    return tmp_path / "out" / "perplexity_ablation.csv"


def test_ablate_writes_a_table_a_csv_file_and_a_figure(ablate, csv):
    given = {"dtype": "bfloat16", "gqa_reduce": "max"}
    words = [word for name, x in given.items() for word in (f"--{name.replace('_', '-')}", x)]
    done = ablate("--sink-tokens", "0,2", "--chunk-size", "16,40", *words)
    assert done.exit_code == 0, done.output
    assert "warning: left out context=64 chunk_size=40" in done.stderr.replace("\n", " ")
    frame = pd.read_csv(csv)
    assert len(frame) == 4
    title = "h2o S=16,40 L=4 H=0,4 K=0,2 gqa_reduce=max"
    assert title in " ".join(done.stdout.split())
    assert all(preset.startswith("h2o,chunk_size=16,") for preset in frame["preset"])
    for name, value in given.items():
        assert set(frame[name]) == {value}
    lines = [line for line in done.stdout.splitlines() if " 1/" in line]
    assert len(lines) == 4
    for line, row in zip(lines, frame.to_dict(orient="records"), strict=True):
        heavy, sinks, dense, sparse = line.split()[:4]
        assert (int(heavy), int(sinks)) == (row["heavy_budget"], row["sink_tokens"])
        assert float(dense) == pytest.approx(row["dense_ppl"], abs=6e-4)
        assert float(sparse) == pytest.approx(row["sparse_ppl"], abs=6e-4)
    assert csv.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert done.stderr.split()[-4:] == ["wrote", str(csv), "wrote", str(csv.with_suffix(".png"))]
    # A preset stands for the settings, if every row has one.
    named = ablation_table(frame.assign(preset=["h2o", "recommended"] * 2))
    assert [column.header for column in named.columns][:2] == ["preset", "dense"]
