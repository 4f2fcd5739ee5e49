"""Pieces of evaluations on workers of Dask: the same results, whatever becomes of the workers."""

import contextlib
import time

import pytest
import torch

from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval import cluster as clusters
from h2o_prefill.eval import run_ablation
from h2o_prefill.generation import Corpus, load_model

pytest.importorskip("pandas")
distributed = pytest.importorskip("distributed")

BASE = PrefillConfig(chunk_size=16, local_window=4, heavy_budget=4)
GRID = {"heavy_budget": [0, 4], "sink_tokens": [0, 2]}
TIMES = ["dense_seconds", "sparse_seconds"]


@contextlib.contextmanager
def _local_client(workers):
    """Workers that are threads of this process, so that patches reach them."""
    options = {"processes": False, "threads_per_worker": 1, "n_workers": workers}
    with (
        distributed.LocalCluster(dashboard_address="localhost:0", **options) as local,
        distributed.Client(local) as connection,
    ):
        yield connection


@pytest.fixture(scope="module")
def client():
    with _local_client(2) as connection:
        yield connection


@pytest.fixture
def workers(client, model_folder):
    clusters._load.cache_clear()
    yield clusters.ModelCluster(client, model_folder, threads=1)


@pytest.fixture
def corpus(tiny):
    return Corpus("tale", tiny.SENTENCE * 60, "tale.txt")


def test_an_ablation_on_workers_writes_the_same_rows_and_goes_on(
    workers, model_folder, corpus, tmp_path
):
    options = {"base": BASE, "datasets": [corpus], "windows": "0:2"}
    options["contexts"] = [64, 48]
    here = run_ablation(model_folder, GRID, tmp_path / "here", **options)
    options |= {"output": tmp_path / "there", "cluster": workers}
    part = {**GRID, "sink_tokens": [2]}
    assert len(run_ablation(model_folder, part, **options)) == 4
    steps = []
    report = lambda done, total, what: steps.append((done, total))  # noqa: E731
    there = run_ablation(model_folder, GRID, on_progress=report, **options)
    assert there.drop(columns=TIMES).equals(here.drop(columns=TIMES)) and len(there) == 8
    assert steps == [(done, 4) for done in range(5)]
    assert run_ablation(model_folder, GRID, **options).equals(there), "nothing runs twice"


def test_a_piece_that_fails_on_a_worker_does_not_stop_the_others(workers, model_folder):
    held = clusters.LoadedModel(*load_model(model_folder))
    pieces = {"good": 1, "bad": 0}
    results = dict(clusters.run_pieces(held, workers, _divide, 6, pieces))
    with pytest.raises(ZeroDivisionError):
        results["bad"]()
    assert results["good"]() == 6


def _divide(held, shared, piece):
    return shared // piece


def test_a_worker_with_another_model_or_version_is_refused(
    client, workers, model_folder, monkeypatch
):
    model, tokenizer = load_model(model_folder)

    def run(workers, function=len):
        held = clusters.LoadedModel(model, tokenizer)
        for _, result in clusters.run_pieces(held, workers, function, None, {"one": None}):
            result()

    with pytest.raises(ValueError, match=r"the worker on .* cannot load the model: .*nowhere"):
        run(clusters.ModelCluster(client, "./nowhere"))
    monkeypatch.setattr(clusters.h2o_prefill, "__version__", "0.0.0")
    with monkeypatch.context() as patch:
        # The worker has what this process has, so it is the request that differs.
        digest = clusters.fingerprint(model)
        patch.setattr(
            clusters, "_work", lambda *_: clusters._load(model_folder, "float32", "9.9", digest)
        )
        with pytest.raises(ValueError, match=r"must have h2o_prefill 9\.9, has 0\.0\.0"):
            run(workers)
    with torch.no_grad():
        model.model.norm.weight[0] += 1
    with pytest.raises(ValueError, match="must have the same model, has different weights from"):
        run(workers)


def test_a_lost_scheduler_is_an_error_at_once(model_folder):
    with _local_client(1) as connection:
        workers = clusters.ModelCluster(connection, model_folder, threads=1)
        held = clusters.LoadedModel(*load_model(model_folder))
        results = clusters.run_pieces(held, workers, _nap, None, {n: n for n in range(20)})
        _, first = next(results)
        assert first() == 1
        connection.cluster.close()
        with pytest.raises(ConnectionError, match="scheduler of the cluster was lost"):
            for _, result in results:
                result()


def _nap(held, shared, piece):
    time.sleep(0.2)
    return torch.get_num_threads()
