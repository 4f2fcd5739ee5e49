"""One process of an ablation: it claims cells that nobody has run, until all are done."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from h2o_prefill.eval.ablation import table
from h2o_prefill.eval.ablation.cells import Cell, Window
from h2o_prefill.eval.ablation.claims import Claim, Claims
from h2o_prefill.eval.ablation.store import AblationStore
from h2o_prefill.eval.attention_flops import count_attention_flops
from h2o_prefill.eval.forward import PromptForward, PromptLogits
from h2o_prefill.eval.perplexity.result import PerplexityResult
from h2o_prefill.eval.perplexity.scoring import WindowScores, score_window
from h2o_prefill.eval.perplexity.summary import summarize
from h2o_prefill.eval.perplexity.windows import scored_rows
from h2o_prefill.eval.runs import Progress, count_layers
from h2o_prefill.hf import enable

# What one cell may raise and another not: too little memory, logits that are not finite.
_FAILURES = (RuntimeError, ArithmeticError, MemoryError)

_PAUSE_SECONDS = 0.5


class AblationWorker:
    """Runs cells, dense once a window and sparse once a cell, among other processes.

    Parameters
    ----------
    network : nn.Module
        A causal language model with dense attention, in eval mode.
    cells : sequence of Cell
        All cells of the grid.
    store : AblationStore
    claims : Claims
    protocol : str
        As `evaluate_perplexity` takes it.
    origin : dict
        Columns of the table that are the same for all cells that this process runs.
    on_progress : callable, optional
        Called with (windows done by all processes, windows in all, what runs next).

    Attributes
    ----------
    failed : dict of str to Exception
        What the cells that this process could not run have raised, by their keys.
    """

    def __init__(
        self,
        network: nn.Module,
        cells: Sequence[Cell],
        store: AblationStore,
        claims: Claims,
        *,
        protocol: str,
        origin: dict[str, Any],
        on_progress: Progress | None = None,
    ) -> None:
        self._network: Any = network
        self._forward = PromptForward(network)
        self._device = next(network.parameters()).device
        self._cells = cells
        self._store = store
        self._claims = claims
        self._protocol = protocol
        self._origin = origin
        self._on_progress = on_progress
        self.failed: dict[str, Exception] = {}

    def run(self) -> None:
        """Return when every cell is finished, by this process or another, or has failed here."""
        try:
            self._run()
        except BaseException:
            self._claims.give_up()
            raise

    def _run(self) -> None:
        while True:
            finished = self._store.rows().keys()
            waiting = [c for c in self._cells if c.key not in {*finished, *self.failed}]
            if not waiting:
                self._report("done")
                return
            if not any(self._advance(cell) for cell in waiting):
                self._report("waiting for other processes")
                time.sleep(_PAUSE_SECONDS)

    def _advance(self, cell: Cell) -> bool:
        """Run a cell, or a dense run that it needs; False if others hold all of these."""
        missing = [window for window in cell.windows if not self._store.has_dense(window.key)]
        if missing:
            return any(self._claim_dense(window) for window in missing)
        claim = self._claims.take(cell.key)
        if claim is None:
            return False
        try:
            with claim:
                self._run_cell(cell, claim)
        except _FAILURES as error:
            self.failed[cell.key] = error
            warnings.warn(f"a cell failed, {cell.label}: {error}", stacklevel=5)
        return True

    def _claim_dense(self, window: Window) -> bool:
        claim = self._claims.take(f"dense-{window.key}")
        if claim is None:
            return False
        with claim:
            if not self._store.has_dense(window.key):
                self._report("dense")
                logits, seconds = self._forward(window.input_ids.to(self._device).unsqueeze(0))
                self._store.add_dense(window.key, logits.rows, seconds)
        return True

    def _run_cell(self, cell: Cell, claim: Claim) -> None:
        if cell.key in self._store.rows():
            return
        rows = scored_rows(self._protocol, cell.context)
        scores: list[WindowScores] = []
        seconds: list[tuple[float, float]] = []
        for index, window in zip(cell.indices, cell.windows, strict=True):
            if not claim.held():
                return
            self._report(cell.label, len(scores))
            ids = window.input_ids.to(self._device)
            with enable(self._network, cell.config):
                sparse, sparse_seconds = self._forward(ids.unsqueeze(0))
            dense_rows, dense_seconds = self._store.dense(window.key)
            dense = PromptLogits(dense_rows.to(self._device), self._forward.head)
            scores.append(score_window(dense, sparse, ids, rows))
            scores[-1].check_finite(index)
            seconds.append((dense_seconds, sparse_seconds))
        result = self._result(cell, scores, seconds, rows)
        if claim.held():
            self._store.add({"cell": cell.key, **self._origin, **_names(cell), **result})

    def _result(
        self,
        cell: Cell,
        scores: list[WindowScores],
        seconds: list[tuple[float, float]],
        rows: range,
    ) -> dict[str, Any]:
        prompts = torch.stack([window.input_ids for window in cell.windows])
        result: PerplexityResult = summarize(
            scores,
            seconds,
            rows=rows,
            config=cell.config,
            protocol=self._protocol,
            context=cell.context,
            windows=list(cell.indices),
            flops=count_attention_flops(prompts, cell.config, count_layers(self._network)),
        )
        return table.measures(result)

    def _report(self, what: str, done_here: int = 0) -> None:
        if self._on_progress is None:
            return
        finished = self._store.rows().keys()
        waiting = [cell for cell in self._cells if cell.key not in finished]
        # Dense runs that no cell waits for need not be made.
        missing = {window.key for cell in waiting for window in cell.windows}
        missing = {key for key in missing if not self._store.has_dense(key)}
        dense = {window.key for cell in self._cells for window in cell.windows}
        total = len(dense) + sum(len(cell.windows) for cell in self._cells)
        left = len(missing) + sum(len(cell.windows) for cell in waiting) - done_here
        self._on_progress(total - left, total, what)


def _names(cell: Cell) -> dict[str, Any]:
    return {
        "dataset": cell.corpus.name,
        "text_source": cell.corpus.source,
        "windows": f"{cell.indices.start}:{cell.indices.stop}",
    }
