"""Processes that share the cells of an ablation: no cell twice, and none lost with its process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from h2o_prefill.eval.ablation.claims import Claims
from h2o_prefill.eval.ablation.run import worker_rank

pytest.importorskip("pandas")


def test_a_claim_is_one_process_until_it_expires(tmp_path: Path) -> None:
    mine, theirs = Claims(tmp_path, 0.4), Claims(tmp_path, 0.4)
    claim = mine.take("cell")
    assert claim is not None and json.loads((tmp_path / "cell.0").read_text())["pid"] == os.getpid()
    assert theirs.take("cell") is None and mine.take("cell") is None
    with claim:
        time.sleep(0.8)
        assert theirs.take("cell") is None, "signs of life keep it"
    assert theirs.take("other") is not None
    time.sleep(0.8)
    assert claim.held()
    taken = theirs.take("cell")
    assert taken is not None and taken.held()
    assert not claim.held(), "whoever wakes up too late sees that it lost"
    assert mine.take("cell") is None


def test_a_claim_is_given_up_by_an_error(tmp_path: Path) -> None:
    claims = Claims(tmp_path, 60)
    claim = claims.take("cell")
    assert claim is not None
    with pytest.raises(KeyboardInterrupt), claim:
        raise KeyboardInterrupt
    assert claims.take("cell") is not None


def test_claims_that_are_not_held_yet_are_given_up_too(tmp_path: Path) -> None:
    mine, theirs = Claims(tmp_path, 60), Claims(tmp_path, 60)
    assert mine.take("cell") is not None and theirs.take("other") is not None
    mine.give_up()
    assert theirs.take("cell") is not None
    assert mine.take("other") is None


def test_one_of_many_takes_an_expired_claim(tmp_path: Path) -> None:
    claims = Claims(tmp_path, 60)
    assert claims.take("cell") is not None
    os.utime(tmp_path / "cell.0", (0, 0))
    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(lambda _: claims.take("cell"), range(32)))
    assert sum(claim is not None for claim in taken) == 1


@pytest.mark.parametrize(
    ("rank", "size", "message"), [("x", "2", "got 'x' and '2'"), ("2", "2", ""), ("-1", "2", "")]
)
def test_ranks_come_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, rank: str, size: str, message: str
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert worker_rank() == (0, 1)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert worker_rank() == (1, 2)
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("WORLD_SIZE", size)
    with pytest.raises(ValueError, match=f"RANK must be a number below WORLD_SIZE.*{message}"):
        worker_rank()


# A process that runs a grid and writes down what it runs. The first stops in the middle of a cell;
# the others begin then, both at once.
_PROCESS = """
import pathlib, sys, time
import torch
from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval import Corpus, run_ablation

def work(tiny, folder, name, react=lambda what: None):
    log, stopped = folder / f"{name}.log", folder / "stopped"

    def step(done, total, what):
        with open(log, "a") as file:
            print(what, file=file)
        if name == "stops" and "=" in what and log.read_text().count(what) == 2:
            stopped.write_text(what)
            time.sleep(600)
        react(what)

    (folder / f"{name}.ready").touch()
    awaited = [] if name == "stops" else ["stopped", "works.ready", "helps.ready"]
    while not all((folder / file).exists() for file in awaited):
        time.sleep(0.001)
    return run_ablation(
        tiny.make_model(), {"heavy_budget": [0, 2, 4], "sink_tokens": [0, 2]}, folder,
        base=PrefillConfig(chunk_size=16, local_window=4, heavy_budget=4), contexts=[64],
        windows="0:2", datasets=[Corpus("tale", tiny.SENTENCE * 6, "tale.txt")],
        tokenizer=tiny.make_tokenizer(), lease_seconds=1.5, on_progress=step)

if __name__ == "__main__":
    sys.path.insert(0, sys.argv[3])
    import tiny_models
    torch.set_num_threads(1)
    print(len(work(tiny_models, pathlib.Path(sys.argv[1]), sys.argv[2])))
"""


@pytest.fixture
def others(tmp_path: Path) -> Iterator[dict[str, subprocess.Popen[str]]]:
    """Two processes beside this one."""
    started = {
        name: subprocess.Popen(
            [sys.executable, "-c", _PROCESS, str(tmp_path), name, str(Path(__file__).parents[1])],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in ("stops", "helps")
    }
    yield started
    for process in started.values():
        process.kill()
        process.wait()


def test_a_killed_processs_cell_is_run_again_and_no_other(
    tiny: ModuleType, tmp_path: Path, others: dict[str, subprocess.Popen[str]]
) -> None:
    code: dict[str, Any] = {"__name__": "process"}
    exec(_PROCESS, code)
    waits: list[float] = []

    def kill_after_a_lease(what: str) -> None:
        if what == "waiting for other processes":
            waits.append(time.monotonic())
            if waits[-1] - waits[0] > 2 and others["stops"].poll() is None:
                cells = tmp_path / "perplexity_ablation_parts" / "cells"
                assert len(list(cells.glob("*.json"))) == 5, "it is alive, so its cell is its own"
                others["stops"].kill()

    frame = code["work"](tiny, tmp_path, "works", kill_after_a_lease)
    assert others["helps"].communicate(timeout=60) == ("6\n", None)
    assert len(frame) == len(set(frame["cell"])) == 6
    assert frame["cell"].tolist() == _csv(tmp_path)["cell"].tolist()
    done = Counter(line for log in tmp_path.glob("*.log") for line in log.read_text().splitlines())
    assert done.pop("waiting for other processes") >= 3
    # Two windows of each cell, and again those of the one that was taken over.
    stopped = (tmp_path / "stopped").read_text()
    assert done == {**dict.fromkeys(done, 2), stopped: 4}
    assert set(done) > {"dense", "done"} and len(done) == 6 + 2


def _csv(folder: Path) -> Any:
    import pandas as pd

    return pd.read_csv(folder / "perplexity_ablation.csv")
