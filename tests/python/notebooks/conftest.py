"""Runs notebooks on a small model and a small text."""

from __future__ import annotations

import json
import pprint
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = Path(__file__).parents[3] / "notebooks"

CONTEXT = 64
SIZES = {"chunk_size": 16, "local_window": 4, "heavy_budget": 4}


@dataclass(frozen=True)
class Executed:
    """A notebook that has run."""

    notebook: Any
    # What the expressions asked for were at its end.
    values: dict[str, Any]

    @property
    def stderr(self) -> str:
        """What the cells wrote to stderr."""
        return "".join(o.text for o in self._outputs() if o.get("name") == "stderr")

    @property
    def stdout(self) -> str:
        """What the cells wrote to stdout."""
        return "".join(o.text for o in self._outputs() if o.get("name") == "stdout")

    def results(self, kind: str) -> list[str]:
        """Return the results of cells that hold a kind of data, as "image/png"."""
        return [o.data[kind] for o in self._outputs() if kind in o.get("data", {})]

    def _outputs(self) -> list[Any]:
        return [output for cell in self.notebook.cells for output in cell.get("outputs", [])]


@pytest.fixture
def execute(tiny: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Executed]:
    """Run a notebook in a temporary folder.

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

    def run(name: str, parameters: dict[str, Any], **expressions: str) -> Executed:
        notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
        given = {**common, **parameters}
        assert set(given) == assigned(parameters_cell(notebook).source)
        parameters_cell(notebook).source = "\n".join(
            f"{key} = {pprint.pformat(value)}" for key, value in given.items()
        )
        asked = ", ".join(f"{key!r}: {value}" for key, value in expressions.items())
        last = nbformat.v4.new_code_cell(f"import json\n\nprint(json.dumps({{{asked}}}))")
        notebook.cells.append(last)
        client = nbclient.NotebookClient(
            notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
        )
        client.execute()
        values = json.loads(notebook.cells.pop().outputs[0].text)
        return Executed(notebook, values)

    return run


@pytest.fixture
def context() -> int:
    return CONTEXT


@pytest.fixture
def sizes() -> dict[str, int]:
    return SIZES


def parameters_cell(notebook: Any) -> Any:
    """Return the one cell that is tagged `parameters`."""
    (cell,) = (c for c in notebook.cells if "parameters" in c.metadata.get("tags", ()))
    return cell


def assigned(source: str) -> set[str]:
    """Return the names that a cell assigns to."""
    return {line.split(" = ")[0] for line in source.splitlines() if " = " in line}
