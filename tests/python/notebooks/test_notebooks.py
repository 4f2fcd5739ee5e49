"""The notebooks, run from the first cell to the last on a small model and a small text."""

import ast
import base64
import json
import pprint
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import h2o_prefill

NOTEBOOKS = Path(__file__).parents[3] / "notebooks"
NAMES = sorted(path.name for path in NOTEBOOKS.glob("*.ipynb"))
CONTEXT = 64
SIZES = {"chunk_size": 16, "local_window": 4, "heavy_budget": 4}

Execute = Callable[..., Any]


@pytest.fixture
def execute(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Execute:
    """Run a notebook in a temporary folder; return what it wrote, its pictures and some values.

    Takes its name, the parameters that it has beside the common ones and, by keyword, expressions
    to evaluate at its end.
    """
    nbclient = pytest.importorskip("nbclient", reason="needs nbclient and ipykernel")
    pytest.importorskip("ipykernel", reason="needs nbclient and ipykernel")
    pytest.importorskip("matplotlib")
    pytest.importorskip("pandas")
    import nbformat

    # The kernel is another process: one thread there too, and nothing of the user's own set-up.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_DATA_DIR", str(tmp_path / "jupyter"))
    # tqdm's, where ipywidgets is not installed.
    monkeypatch.setenv("PYTHONWARNINGS", "ignore:IProgress not found")
    text = tmp_path / "text.txt"
    text.write_text(tiny.SENTENCE * 10)
    common = {
        "MODEL": str(tiny.save_model(tmp_path / "model")),
        "DATASET": "wikitext2",
        "TEXT_FILE": str(text),
        "CONTEXT": CONTEXT,
        "CHANGES": SIZES,
    }

    def run(name: str, parameters: dict[str, Any], **expressions: str) -> Any:
        notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
        (cell,) = (x for x in notebook.cells if "parameters" in x.metadata.get("tags", ()))
        given = {**common, **parameters}
        lines = cell.source.splitlines()
        assert set(given) == {line.split(" = ")[0] for line in lines if " = " in line}
        cell.source = "\n".join(f"{key} = {pprint.pformat(x)}" for key, x in given.items())
        asked = ", ".join(f"{key!r}: {value}" for key, value in expressions.items())
        last = nbformat.v4.new_code_cell(f"import json\n\nprint(json.dumps({{{asked}}}))")
        notebook.cells.append(last)
        where = {"kernel_name": "python3", "resources": {"metadata": {"path": tmp_path}}}
        nbclient.NotebookClient(notebook, timeout=300, **where).execute()
        values = json.loads(notebook.cells.pop().outputs[0].text)
        outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
        streams = {
            name: "".join(x.text for x in outputs if x.get("name") == name)
            for name in ("stdout", "stderr")
        }
        found = (x.data["image/png"] for x in outputs if "image/png" in x.get("data", {}))
        pictures = [base64.b64decode(data) for data in found]
        assert len(set(pictures)) == len(pictures)
        assert all(picture.startswith(b"\x89PNG") for picture in pictures)
        return SimpleNamespace(values=values, pictures=len(pictures), **streams)

    return run


def test_quick_start(execute: Execute, tiny: Any) -> None:
    done = execute(
        "quick_start.ipynb",
        {"NEW_TOKENS": 8, "LINEAR_LENGTHS": [32, 64]},
        dense="dense[0].tolist()",
        sparse="sparse[0].tolist()",
        after=(
            "{'active': handle.active, 'attention': model.config._attn_implementation, "
            "'difference': difference, 'cached': cache.get_seq_length(), 'answers': answers}"
        ),
        cost="cost.T.to_dict('list')",
        step_difference="step_difference",
    )
    model, tokenizer = tiny.make_model(), tiny.make_tokenizer()
    text = tiny.SENTENCE * 10
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[:, :CONTEXT]
    greedy = {"max_new_tokens": 8, "do_sample": False}
    assert done.values["dense"] == model.generate(ids, **greedy)[0].tolist()
    with h2o_prefill.enable(model, **SIZES):
        assert done.values["sparse"] == model.generate(ids, **greedy)[0].tolist()
    assert done.values["dense"] != done.values["sparse"]

    after = done.values["after"]
    assert not after["active"] and after["attention"] == "sdpa"
    assert after["difference"] < 1e-4 and after["cached"] == CONTEXT
    assert [answer.split()[0] for answer in after["answers"]] == ["In", "The"]
    reason = "attention_mask has holes"
    assert done.stderr.count("Warning") == done.stderr.count(reason) == 1
    assert reason in done.stdout  # of the error that `strict` makes of it

    assert set(done.values["cost"]) == {"32", "64"}
    assert all(len(times) == 2 and min(times) > 0 for times in done.values["cost"].values())
    assert done.values["step_difference"] < 1e-5
    assert done.pictures == 1


@pytest.mark.slow
def test_perplexity_and_ablation(execute: Execute, tiny: Any, tmp_path: Path) -> None:
    done = execute(
        "perplexity_and_ablation.ipynb",
        {
            "WINDOWS": "0:2",
            "ABLATION_WINDOWS": "1:3",
            "LOCAL_WINDOWS": [2, 4],
            "HEAVY_BUDGETS": [0, 4],
            "RECALL": [0, 2],
            "OUTPUT": "results",
        },
        delta="{name: result.delta_percent for name, result in results.items()}",
        summary="summary.loc['delta_percent'].to_dict()",
        by_chunk="by_chunk.to_dict('list')",
        cells="frame[settings].values.tolist()",
        errors="frame['stderr_percent'].tolist()",
    )
    tokens = tiny.make_tokenizer()(tiny.SENTENCE * 10, verbose=False)["input_ids"]
    for name in ("h2o", "recommended"):
        config = h2o_prefill.preset_config(name, **SIZES)
        expected = h2o_prefill.eval.evaluate_perplexity(
            *(tiny.make_model(), tokens, config),
            tokenizer=tiny.make_tokenizer(),
            context=CONTEXT,
            windows="0:2",
        )
        assert done.values["delta"][name] == pytest.approx(expected.delta_percent, rel=1e-3)
        assert done.values["by_chunk"][name] == pytest.approx(expected.sparse.ppl_by_chunk, 1e-3)
        assert done.values["by_chunk"]["dense"] == pytest.approx(expected.dense.ppl_by_chunk, 1e-3)
    assert done.values["summary"] == done.values["delta"]

    grid = [[window, heavy, recall] for window in (2, 4) for heavy in (0, 4) for recall in (0, 2)]
    assert sorted(done.values["cells"]) == grid
    assert all(error > 0 for error in done.values["errors"])
    assert (tmp_path / "results" / "perplexity_ablation.csv").is_file()
    assert done.pictures == 3
    assert done.stderr == ""


@pytest.mark.slow
def test_memory_sets_and_recall(execute: Execute, tiny: Any, tmp_path: Path) -> None:
    done = execute(
        "memory_sets_and_recall.ipynb",
        {"LAYER": 1, "OUTPUT": "pictures"},
        memory="list(measures.memory.shape)",
        best="best.indices.tolist()",
        scores="cache.layers[1].state.scores[0].tolist()",
        mass="{name: by_layer['mass_recall', name].tolist() for name in ('h2o', 'recommended')}",
        sentence="SENTENCE",
        recalled="[places.tolist() for places in recalled]",
    )
    chunks, width = CONTEXT // SIZES["chunk_size"], SIZES["local_window"] + SIZES["heavy_budget"]
    widest = width * h2o_prefill.PRESETS["recommended"].max_widen
    assert done.values["memory"] == [chunks, 2, 2, widest]
    assert done.values["best"] == torch.tensor(done.values["scores"]).topk(8).indices.tolist()
    tokens = tiny.make_tokenizer()(tiny.SENTENCE * 10, verbose=False)["input_ids"][:CONTEXT]
    for name, mass in done.values["mass"].items():
        config = h2o_prefill.preset_config(name, **SIZES)
        found = h2o_prefill.eval.measure_attention(tiny.make_model(), torch.tensor(tokens), config)
        assert mass == pytest.approx((100 * found.mass_recall.mean(1)).tolist(), rel=1e-4)

    # A token a letter: the end of the second "Ada Lovelace" recalls the end of the first.
    first, second = (m.end() - 1 for m in re.finditer("Ada Lovelace", done.values["sentence"]))
    recalled = done.values["recalled"]
    assert len(recalled) == len(done.values["sentence"]) and recalled[second] == [first, first + 1]
    assert "lists of earlier rows unchanged: True" in done.stdout
    assert (tmp_path / "pictures" / "errors.png").is_file()
    assert done.pictures == 4
    assert done.stderr == ""


@pytest.mark.parametrize("name", NAMES)
def test_notebooks_are_kept_with_the_results_of_one_run(name: str) -> None:
    path = NOTEBOOKS / name
    assert path.stat().st_size < 220_000 and f"test_{path.stem}" in globals()
    notebook = json.loads(path.read_text(encoding="utf-8"))
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    for cell in code:
        source = "".join(cell["source"])
        shows = isinstance(ast.parse(source).body[-1], ast.Expr) or "print(" in source
        assert cell["outputs"] or not shows, source
    # What editors add would name the machine, or change with every save.
    assert notebook["metadata"] == {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    tags = [cell["metadata"] for cell in notebook["cells"] if cell["metadata"]]
    assert tags == [{"tags": ["parameters"]}] == [code[0]["metadata"]]
    # No errors, no warnings but the library's, no paths.
    outputs = [output for cell in code for output in cell["outputs"]]
    kinds = {"stream", "execute_result", "display_data"}
    assert {output["output_type"] for output in outputs} <= kinds
    texts = [(output["name"], output["text"]) for output in outputs if "text" in output]
    texts += [item for output in outputs for item in output.get("data", {}).items()]
    assert {kind for kind, _ in texts} <= {
        "stdout",
        "stderr",
        "text/plain",
        "text/html",
        "image/png",
    }
    for kind, text in texts:
        written = "".join(text)
        assert kind == "image/png" or not re.search(r"""(^|[\s"'(=])(/|~/)\w""", written), written
        assert kind != "stderr" or written.startswith("UserWarning: h2o_prefill: ")
