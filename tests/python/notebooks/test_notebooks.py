"""The notebooks, run from the first cell to the last on a small model."""

from __future__ import annotations

import ast
import base64
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import h2o_prefill

NOTEBOOKS = Path(__file__).parents[3] / "notebooks"
NAMES = sorted(path.name for path in NOTEBOOKS.glob("*.ipynb"))

Execute = Callable[..., Any]


def assert_figures(executed: Any, count: int) -> None:
    """Check that so many cells show a picture, each another one."""
    pictures = [base64.b64decode(data) for data in executed.results("image/png")]
    assert len(set(pictures)) == len(pictures) == count
    assert all(picture.startswith(b"\x89PNG") for picture in pictures)


def test_quick_start(execute: Execute, tiny: Any, context: int, sizes: dict[str, int]) -> None:
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
    ids = tokenizer(text, return_tensors="pt", verbose=False).input_ids[:, :context]
    greedy = {"max_new_tokens": 8, "do_sample": False}
    assert done.values["dense"] == model.generate(ids, **greedy)[0].tolist()
    with h2o_prefill.enable(model, **sizes):
        assert done.values["sparse"] == model.generate(ids, **greedy)[0].tolist()
    assert done.values["dense"] != done.values["sparse"]

    after = done.values["after"]
    assert not after["active"] and after["attention"] == "sdpa"
    assert after["difference"] < 1e-4 and after["cached"] == context
    assert [answer.split()[0] for answer in after["answers"]] == ["In", "The"]
    reason = "attention_mask has holes"
    assert done.stderr.count("Warning") == done.stderr.count(reason) == 1
    assert reason in done.stdout  # of the error that `strict` makes of it

    assert set(done.values["cost"]) == {"32", "64"}
    assert all(len(times) == 2 and min(times) > 0 for times in done.values["cost"].values())
    assert done.values["step_difference"] < 1e-5
    assert_figures(done, 1)


@pytest.mark.slow
def test_perplexity_and_ablation(
    execute: Execute, tiny: Any, context: int, sizes: dict[str, int], tmp_path: Path
) -> None:
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
        config = h2o_prefill.preset_config(name, **sizes)
        expected = h2o_prefill.eval.evaluate_perplexity(
            *(tiny.make_model(), tokens, config),
            tokenizer=tiny.make_tokenizer(),
            context=context,
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
    assert_figures(done, 3)
    assert done.stderr == ""


@pytest.mark.slow
def test_memory_sets_and_recall(
    execute: Execute, tiny: Any, context: int, sizes: dict[str, int], tmp_path: Path
) -> None:
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
    chunks, width = context // sizes["chunk_size"], sizes["local_window"] + sizes["heavy_budget"]
    widest = width * h2o_prefill.PRESETS["recommended"].max_widen
    assert done.values["memory"] == [chunks, 2, 2, widest]
    assert done.values["best"] == torch.tensor(done.values["scores"]).topk(8).indices.tolist()
    tokens = tiny.make_tokenizer()(tiny.SENTENCE * 10, verbose=False)["input_ids"][:context]
    for name, mass in done.values["mass"].items():
        config = h2o_prefill.preset_config(name, **sizes)
        found = h2o_prefill.eval.measure_attention(tiny.make_model(), torch.tensor(tokens), config)
        assert mass == pytest.approx((100 * found.mass_recall.mean(1)).tolist(), rel=1e-4)

    # A token a letter: the end of the second "Ada Lovelace" recalls the end of the first.
    first, second = (m.end() - 1 for m in re.finditer("Ada Lovelace", done.values["sentence"]))
    recalled = done.values["recalled"]
    assert len(recalled) == len(done.values["sentence"]) and recalled[second] == [first, first + 1]
    assert "lists of earlier rows unchanged: True" in done.stdout
    assert (tmp_path / "pictures" / "errors.png").is_file()
    assert_figures(done, 4)
    assert done.stderr == ""


@pytest.mark.parametrize("name", NAMES)
def test_notebooks_are_kept_with_the_results_of_one_run(name: str) -> None:
    path = NOTEBOOKS / name
    assert path.stat().st_size < 220_000
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
    sources = "".join("".join(cell["source"]) for cell in notebook["cells"])
    assert not re.search(r"""["'](/|~|[A-Za-z]:\\)""", sources)
    # Results: no errors, no warnings but the library's, no paths, no state of widgets.
    outputs = [output for cell in code for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} <= {
        "stream",
        "execute_result",
        "display_data",
    }
    data = [item for output in outputs for item in output.get("data", {}).items()]
    assert {kind for kind, _ in data} <= {"text/plain", "text/html", "image/png"}
    streams = [(output["name"], output["text"]) for output in outputs if "text" in output]
    for kind, text in [*streams, *data]:
        written = "".join(text)
        if kind == "image/png":
            assert base64.b64decode(written).startswith(b"\x89PNG")
        else:
            assert not re.search(r"""(^|[\s"'(=])(/|~/|[A-Z]:\\)\w""", written), written
            assert kind != "stderr" or written.startswith("UserWarning: h2o_prefill: ")


def test_every_notebook_is_run() -> None:
    assert {f"test_{Path(name).stem}" for name in NAMES} <= set(globals())
