"""The folder of an ablation: finished cells, dense runs, claims, and the CSV file beside them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from h2o_prefill.eval.ablation import table
from h2o_prefill.eval.atomic_write import replaced_file
from h2o_prefill.eval.report import write_json

CSV_NAME = "perplexity_ablation.csv"
PARTS_NAME = "perplexity_ablation_parts"


class AblationStore:
    """The files of an ablation, which any number of processes share.

    Every finished cell is a file of its own, and the CSV file is made anew from all of them, and
    from the rows that it held before, whenever one comes: so no two processes write one file, and
    the folder of the parts may be deleted at any time when nothing runs.

    Parameters
    ----------
    output : Path
        Folder for the CSV file; made if it is not there.
    """

    def __init__(self, output: Path) -> None:
        self.csv_path = output / CSV_NAME
        self.claims_folder = output / PARTS_NAME / "claims"
        self._cells = output / PARTS_NAME / "cells"
        self._dense = output / PARTS_NAME / "dense"
        self._rows = {row["cell"]: row for row in table.read_rows(self.csv_path)}
        for folder in (self._cells, self._dense):
            folder.mkdir(parents=True, exist_ok=True)
        self._merge()

    def rows(self) -> dict[str, dict[str, Any]]:
        """Return the rows of all finished cells, by their keys."""
        # Not the hidden files that are still being written.
        for path in self._cells.glob("[!.]*.json"):
            if path.stem not in self._rows:
                self._rows[path.stem] = json.loads(path.read_text(encoding="utf-8"))
        return dict(self._rows)

    def add(self, row: dict[str, Any]) -> None:
        """Write the row of a finished cell, and the CSV file."""
        write_json(row, self._cells / f"{row['cell']}.json")
        self._merge()

    def has_dense(self, key: str) -> bool:
        """Return whether the dense run of a window is there."""
        return self._dense_path(key).exists()

    def add_dense(self, key: str, rows: Tensor, seconds: float) -> None:
        """Write the dense run of a window: its rows [T, C], as `PromptLogits` takes them."""
        with replaced_file(self._dense_path(key)) as path:
            torch.save({"rows": rows.cpu(), "seconds": seconds}, path)

    def dense(self, key: str) -> tuple[Tensor, float]:
        """Return the rows, on the CPU, and the seconds of the dense run of a window."""
        kept = torch.load(self._dense_path(key), map_location="cpu", mmap=True, weights_only=True)
        return kept["rows"], kept["seconds"]

    def _dense_path(self, key: str) -> Path:
        return self._dense / f"{key}.pt"

    def _merge(self) -> None:
        # Another process may replace the file by an older state than this one's: whoever is last to
        # replace it looks again afterwards.
        rows = self.rows()
        while True:
            with replaced_file(self.csv_path) as path:
                table.to_frame(rows.values()).to_csv(path, index=False)
            now = self.rows()
            if now.keys() == rows.keys():
                return
            rows = now
