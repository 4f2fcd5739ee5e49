"""The ablation: its grid, its rows, and that no finished cell runs twice."""

import dataclasses
import itertools
import math
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from h2o_prefill.cli.tables import ablation_table
from h2o_prefill.config import PrefillConfig, format_value
from h2o_prefill.eval import evaluate_perplexity, forward, perplexity, run_ablation
from h2o_prefill.eval.ablation import build_grid, parse_values
from h2o_prefill.eval.ablation_table import COLUMNS, add_row, read_rows
from h2o_prefill.eval.plots import front, plot_ablation
from h2o_prefill.generation import Corpus
from h2o_prefill.presets import PRESETS

pd = pytest.importorskip("pandas")

CONTEXT = 64
BASE = PrefillConfig(chunk_size=16, local_window=4, heavy_budget=4)
AXES = {"heavy_budget": [0, 4], "recall": [0, 2]}


@pytest.fixture
def corpus(tiny):
    return Corpus("tale", tiny.SENTENCE * 6, "tale.txt")


@pytest.fixture
def ablate(tiny, tiny_tokenizer, corpus, tmp_path, monkeypatch):
    """Run a small grid; the result's `forwards` counts the model's runs."""
    counted = Counter()
    run_model = forward.PromptForward.__call__

    def count(self, input_ids):
        counted[str(self._model.config._attn_implementation)] += 1
        return run_model(self, input_ids)

    monkeypatch.setattr(forward.PromptForward, "__call__", count)

    def run(axes=AXES, **changes):
        counted.clear()
        options = {"output": tmp_path / "out", "base": BASE, "datasets": [corpus]}
        options |= {"contexts": [CONTEXT], "windows": "0:2", "tokenizer": tiny_tokenizer}
        model = changes.pop("model", None) or tiny.make_model()
        return run_ablation(model, axes, **{**options, **changes})

    run.forwards = counted
    return run


def _csv(folder):
    return pd.read_csv(folder / "perplexity_ablation.csv", keep_default_na=False, na_values=[""])


def test_a_row_is_what_the_evaluation_finds(ablate, tiny_model, tiny_tokenizer, corpus, tmp_path):
    frame = ablate(model=tiny_model, model_name="tiny")
    assert len(frame) == 4
    for row in frame.to_dict(orient="records"):
        config = BASE.replace(heavy_budget=row["heavy_budget"], recall=row["recall"])
        given = {"tokenizer": tiny_tokenizer, "context": CONTEXT, "windows": "0:2"}
        result = evaluate_perplexity(tiny_model, corpus, config, **given)
        assert abs(result.delta_percent) > 0.01
        ppl = result.dense.ppl, result.sparse.ppl
        assert (row["dense_ppl"], row["sparse_ppl"]) == pytest.approx(ppl, rel=1e-6)
        for name in ("delta_percent", "stderr_percent", "worst_percent", "kl_mean"):
            assert row[name] == pytest.approx(getattr(result, name), rel=1e-3, abs=1e-6)
        assert row["top1_agreement"] == result.top1_agreement
        assert row["attention_flops_ratio"] == pytest.approx(result.attention_flops_ratio)
        assert math.isnan(row["recalled_keys"]) == (result.recalled_keys is None)
        what = (row[name] for name in ("model", "dtype", "dataset", "context", "windows"))
        assert tuple(what) == ("tiny", "float32", "tale", CONTEXT, "0:2")
    assert list(_csv(tmp_path / "out").columns) == list(frame.columns) == list(COLUMNS)


def test_dense_runs_once_and_finished_cells_never_again(ablate, tiny):
    first = ablate()
    assert ablate.forwards == {"sdpa": 2, "h2o_prefill": 4 * 2}
    again = ablate()
    assert ablate.forwards == {}
    assert again.equals(first)
    steps = []
    more = {**AXES, "sink_tokens": [0, 2]}
    larger = ablate(more, on_progress=lambda done, total, what: steps.append((done, total)))
    assert ablate.forwards == {"sdpa": 2, "h2o_prefill": 4 * 2}
    assert steps == [(done, 10) for done in range(11)]
    assert len(larger) == 8
    kept = larger[larger["sink_tokens"] == 0].reset_index(drop=True)
    assert kept.equals(first)
    ablate(windows="0:3")
    assert ablate.forwards == {"sdpa": 3, "h2o_prefill": 4 * 3}
    # Other weights, and the same weights with other position embeddings, are other models.
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}
    rope["original_max_position_embeddings"] = 512
    for model in (tiny.make_model(seed=1), tiny.make_model(rope_parameters=rope)):
        ablate(model=model)
        assert ablate.forwards == {"sdpa": 2, "h2o_prefill": 4 * 2}


def test_runs_into_one_folder_keep_each_others_rows(ablate, tmp_path):
    def begin_another(done, total, what):
        if done == 0:
            ablate({"heavy_budget": [2, 3]})

    ablate({"heavy_budget": [0, 4]}, on_progress=begin_another)
    assert _csv(tmp_path / "out")["heavy_budget"].tolist() == [0, 2, 3, 4]

    path = tmp_path / "other.csv"
    rows = [{"cell": str(number)} for number in range(24)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(add_row, rows, itertools.repeat(path)))
    assert sorted(map(int, read_rows(path))) == list(range(24))


def test_a_cell_that_fails_does_not_stop_the_others(ablate, tmp_path, monkeypatch):
    def no_memory(model, config, **options):
        if config.heavy_budget == 0 and config.recall == 2:
            raise RuntimeError("no memory\nand a backtrace")
        return prefill_mode(model, config, **options)

    prefill_mode = perplexity.prefill_mode
    warned = pytest.warns(UserWarning, match=r"failed, tale 64 .*heavy_budget=0.*: no memory$")
    refused = pytest.raises(RuntimeError, match=r"1 of 4 cells failed.*heavy_budget=0,.*recall=2")
    with monkeypatch.context() as patch, warned, refused:
        patch.setattr(perplexity, "prefill_mode", no_memory)
        ablate()
    assert len(_csv(tmp_path / "out")) == 3
    assert len(ablate()) == 4
    assert ablate.forwards == {"sdpa": 2, "h2o_prefill": 2}


def test_a_table_of_an_older_version_is_kept_and_another_one_refused(ablate, tmp_path, monkeypatch):
    first = ablate({})
    path = tmp_path / "out" / "perplexity_ablation.csv"
    _csv(tmp_path / "out").drop(columns="recall_characters").to_csv(path, index=False)
    monkeypatch.setattr("h2o_prefill.eval.ablation.commit", lambda: "0123456+")
    ablate({"sink_tokens": [0, 2]})
    assert ablate.forwards == {"sdpa": 2, "h2o_prefill": 2}
    table = _csv(tmp_path / "out")
    assert list(table.columns) == list(COLUMNS)
    assert table["recall_characters"].isna().tolist() == [True, False]
    assert table["cell"][0] == first["cell"][0]

    # A column that somebody added stays.
    whole = table.astype({"recall_characters": "Int64"})
    whole.assign(note=["007", "NA"]).to_csv(path, index=False)
    assert ablate({"sink_tokens": [0, 2]})["note"].tolist() == ["007", "NA"]
    assert ablate.forwards == {}

    for text in ("a,b\n1,2\n", "", "cell,context\nx,many\n"):
        path.write_text(text)
        with pytest.raises(ValueError, match="must be a table of an ablation"):
            ablate()
        assert path.read_text() == text


def test_figures_show_the_table(ablate, tmp_path):
    """Points, of two texts their mean; a grid of both budgets is a heat map."""
    frame = ablate({"heavy_budget": [0, 4], "sink_tokens": [0, 2]}, contexts=[64, 32])
    for rows in (frame, frame[1:]):
        (axes,) = plot_ablation(rows, tmp_path / "p.png").axes
        cells = rows.groupby(["heavy_budget", "sink_tokens"], sort=False)
        flops, loss = axes.containers[0].lines[0].get_data()
        expected = cells["attention_flops_ratio"].agg(lambda ratios: (100 / ratios).mean())
        assert list(flops) == pytest.approx(expected.tolist())
        assert list(loss) == pytest.approx(cells["delta_percent"].mean().tolist())
    points = {"flops": [3.0, 1.0, 2.0, 2.0, 4.0], "loss": [8.0, 10.0, 9.0, 8.5, 8.0]}
    assert front(pd.DataFrame(points)).index.tolist() == [1, 3, 0]

    frame = ablate({"local_window": [2, 4, 8], "heavy_budget": [4, 2]}, contexts=[64])
    (panel,) = plot_ablation(frame, tmp_path / "p.svg").axes
    for text in panel.texts:
        column, row = text.get_position()
        cell = (frame["local_window"] == (2, 4, 8)[column]) & (frame["heavy_budget"] == (2, 4)[row])
        (found,) = frame[cell].itertuples()
        assert panel.images[0].get_array()[row, column] == found.kl_mean
        assert f"{found.delta_percent:+.2f} %\n{found.kl_mean:.4f}" in text.get_text()
    assert len(panel.texts) == 6
    # With another setting that varies, the panel is of points.
    rows = frame.assign(sink_tokens=range(6))
    assert not plot_ablation(rows, tmp_path / "p.png").axes[0].images


def test_a_grid_is_the_product_of_its_values():
    axes = {"heavy_budget": [0, 4, 4], "sink_tokens": [0, 2]}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        grid = build_grid(axes, [64, 32], [BASE, BASE])
    assert grid == [
        (context, BASE.replace(heavy_budget=heavy, sink_tokens=sinks))
        for context in (64, 32)
        for heavy in (0, 4)
        for sinks in (0, 2)
    ]
    presets = build_grid(
        {"heavy_budget": [64, 128]}, [4096], [PRESETS["h2o"], PRESETS["recommended"]]
    )
    assert [config.recall > 0 for _, config in presets] == [False, False, True, True]


def test_what_cannot_be_run_is_said_once_a_reason():
    axes = {"chunk_size": [16, 64], "local_window": [0, 14], "heavy_budget": [0]}
    with pytest.warns(UserWarning) as said:
        grid = build_grid(axes, [64], [BASE])
    assert [(c.chunk_size, c.local_window) for _, c in grid] == [(16, 14)]
    begin = "left out context=64 chunk_size={} local_window=0 heavy_budget=0"
    empty, by_context = (str(warning.message) for warning in said)
    assert empty.startswith(begin.format(16) + ": ") and "must not all be 0" in empty
    assert by_context.startswith(begin.format(64) + " and 1 more: ")
    assert "at least two chunks of 64" in by_context


def test_settings_without_effect_do_not_make_cells():
    grid = build_grid({"recall": [0, 2], "recall_characters": [1, 2]}, [64], [BASE])
    assert [(c.recall, c.recall_characters) for _, c in grid] == [(0, 0), (2, 1), (2, 2)]


def test_values_are_read_as_in_a_settings_text():
    assert parse_values("chunk_size", "512, 1024") == [512, 1024]
    assert parse_values("dense_layers", "none,0,0+1") == [(), (0,), (0, 1)]
    for field in dataclasses.fields(PrefillConfig):
        assert parse_values(field.name, format_value(field.default)) == [field.default]
        assert field.name in COLUMNS
    with pytest.raises(ValueError, match=r"dense_layers must be .*got "):
        parse_values("dense_layers", "0-3")


def test_rows_have_the_name_of_their_settings(ablate, tiny):
    given = {"base": ["h2o", "recommended"], "contexts": [2048], "windows": "0:1"}
    given["datasets"] = [Corpus("tale", tiny.SENTENCE * 60, "tale.txt")]
    model = tiny.make_model(max_position_embeddings=2048)
    frame = ablate({"chunk_size": [768, 1024]}, model=model, **given)
    names = [name + size for name in ("h2o", "recommended") for size in ("", ",chunk_size=768")]
    assert sorted(frame["preset"]) == names
    assert ablation_table(frame).columns[0].header == "chunk\nsize"
    # A preset stands for the settings, if every row has one.
    named = ablation_table(frame[frame["chunk_size"] == 1024])
    assert [column.header for column in named.columns][:2] == ["preset", "dense"]
