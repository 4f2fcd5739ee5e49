"""The notebooks, run from the first cell to the last on a small model and a small text."""

import ast
import json
import pprint
import re
from pathlib import Path

import pytest

NOTEBOOKS = Path(__file__).parents[3] / "notebooks"
NAMES = sorted(path.name for path in NOTEBOOKS.glob("*.ipynb"))
CONTEXT = 64
SIZES = {"chunk_size": 16, "local_window": 4, "heavy_budget": 4, "min_prefill": None}

# By notebook: its own parameters, what must hold at its end, how many pictures, stderr, stdout.
RUNS = {
    "quick_start.ipynb": (
        {"NEW_TOKENS": 8, "LINEAR_LENGTHS": [32, 64]},
        "not torch.equal(dense, sparse) and not handle.active and difference < 1e-4"
        " and model.config._attn_implementation == 'sdpa' and cache.get_seq_length() == CONTEXT"
        " and [x.split()[0] for x in answers] == ['In', 'The']"
        " and list(cost.index) == [32, 64] and cost.to_numpy().min() > 0"
        " and step_difference < 1e-5",
        1,
        "attention_mask hides tokens",
        "attention_mask hides tokens",  # of the error that `strict` makes of it
    ),
    "perplexity_and_ablation.ipynb": (
        {
            **{"WINDOWS": "0:2", "ABLATION_WINDOWS": "1:3", "RECALL": [0, 2], "OUTPUT": "results"},
            **{"LOCAL_WINDOWS": [2, 4], "HEAVY_BUDGETS": [0, 4]},
        },
        "list(results) == ['h2o', 'recommended'] and all("
        "by_chunk[name].tolist() == result.sparse.ppl_by_chunk"
        " and summary.loc['delta_percent', name] == result.delta_percent"
        " for name, result in results.items()) and (frame['stderr_percent'] > 0).all()"
        " and sorted(frame[settings].values.tolist())"
        " == [[x, y, z] for x in (2, 4) for y in (0, 4) for z in (0, 2)]",
        1,
        "",
        "",
    ),
    "memory_sets_and_recall.ipynb": (
        {"LAYER": 1, "OUTPUT": "pictures"},
        "sorted(best.indices.tolist())"
        " == sorted(cache.layers[1].state.scores[0].topk(8).indices.tolist())"
        " and by_layer['mass_recall', 'h2o'].between(1, 100).all()"
        " and [x.tolist() for x in recalled][SENTENCE.rfind('Ada Lovelace') + 11]"
        # A token a letter: the end of the name recalls its end before, and what follows.
        " == [SENTENCE.find('Ada Lovelace') + i for i in range(11, 15)]",
        4,
        "",
        "lists of earlier rows unchanged: True",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_notebook_runs(tiny, tmp_path, monkeypatch, name):
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
    parameters, holds, pictures, warned, printed = RUNS[name]
    given = {"MODEL": str(tiny.save_model(tmp_path / "model")), "DATASET": "wikitext2"}
    given |= {"TEXT_FILE": str(text), "CONTEXT": CONTEXT, "CHANGES": SIZES, **parameters}
    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    (cell,) = (x for x in notebook.cells if "parameters" in x.metadata.get("tags", ()))
    lines = cell.source.splitlines()
    assert set(given) == {line.split(" = ")[0] for line in lines if " = " in line}
    cell.source = "\n".join(f"{key} = {pprint.pformat(x)}" for key, x in given.items())
    notebook.cells.append(nbformat.v4.new_code_cell(f"import torch\n\nassert {holds}"))
    where = {"kernel_name": "python3", "resources": {"metadata": {"path": tmp_path}}}
    nbclient.NotebookClient(notebook, timeout=300, **where).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    streams = ("stdout", "stderr")
    out, err = ("".join(x.text for x in outputs if x.get("name") == name) for name in streams)
    assert (
        len({x.data["image/png"] for x in outputs if "image/png" in x.get("data", {})}) == pictures
    )
    assert err.count("Warning") == bool(err) == bool(warned) and warned in err and printed in out


@pytest.mark.parametrize("name", NAMES)
def test_notebooks_are_kept_with_the_results_of_one_run(name):
    path = NOTEBOOKS / name
    assert path.stat().st_size < 220_000 and name in RUNS
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
    assert "error" not in {output["output_type"] for output in outputs}
    texts = [(output["name"], output["text"]) for output in outputs if "text" in output]
    texts += [item for output in outputs for item in output.get("data", {}).items()]
    for kind, text in texts:
        written = "".join(text)
        assert kind == "image/png" or not re.search(r"""(^|[\s"'(=])(/|~/)\w""", written), written
        assert kind != "stderr" or written.startswith("UserWarning: h2o_prefill: ")
