"""Shared fixtures: poisoned memory, one thread unless a test asks for more, --runslow."""

import importlib
import os

import pytest
import torch

from h2o_prefill import testing

# cuBLAS is deterministic with a workspace of a fixed size, which it asks for when it is loaded.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def pytest_addoption(parser):
    parser.addoption("--runslow", action="store_true", help="run the tests marked slow")


def pytest_collection_modifyitems(config, items):
    if config.getoption("--runslow"):
        return
    skip = pytest.mark.skip(reason="takes minutes: run with --runslow")
    for item in items:
        if "slow" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fill uninitialised tensors with NaN, so that reading what nothing wrote is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def one_thread(request):
    """Small problems run fastest on one thread, and so does every test beside other workers."""
    alone = "PYTEST_XDIST_WORKER" not in os.environ
    if alone and "model" in request.keywords:
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(params=testing.devices())
def device(request):
    return request.param


@pytest.fixture(scope="session")
def tiny():
    """The module of small models and their tokenizer."""
    pytest.importorskip("transformers")
    return importlib.import_module("tiny_models")
