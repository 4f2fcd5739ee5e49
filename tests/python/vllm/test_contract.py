"""In which vLLM the plugin works, with modules that have what it uses in the place of vLLM's."""

import logging
import sys
from types import ModuleType, SimpleNamespace

import pytest

import h2o_prefill.vllm
from h2o_prefill.vllm import contract, counters, register

REGISTERED = {
    name: [name, f"h2o_prefill.vllm.{name}.Backend", "install"] for name in ("cpu", "cuda")
}
SPLIT = "vllm.v1.core.sched.scheduler.Scheduler._mamba_block_aligned_split"


def function(parameters):
    text = parameters.replace("...", "more=None").replace("*", "*others, **by_name")
    return eval(f"(lambda {text}: None)")


@pytest.fixture
def fake(monkeypatch):
    """Return the modules by name, and what the plugin does to them."""
    used = contract.USED | contract.CPU | contract.CUDA
    names = [place.partition(":")[0] for place in used]
    modules = {name: ModuleType(name) for name in ["vllm", *names]}
    for place, text in used.items():
        found = contract.NAME.findall(text)
        members = {name: function(inner) if call else None for name, call, inner in found}
        module, _, kind = place.partition(":")
        more = {kind: type(kind, (), members)} if kind else members
        vars(modules[module]).update(more)
    done = []
    modules["vllm"].version = SimpleNamespace()
    platform = SimpleNamespace(is_cpu=lambda: True, is_cuda=lambda: False)
    modules["vllm.platforms"] = SimpleNamespace(current_platform=platform)
    modules["vllm.logger"] = SimpleNamespace(init_logger=logging.getLogger)
    registry = modules["vllm.v1.attention.backends.registry"]
    registry.AttentionBackendEnum = SimpleNamespace(CPU_ATTN="cpu", FLASH_ATTN="cuda")
    registry.register_backend = lambda backend, class_path: done.extend([backend, class_path])
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    steps = {name: lambda: None for name in ("rules", "checkpoint_bytes")}
    runner = SimpleNamespace(**steps, install=lambda: done.append("install"))
    monkeypatch.setattr(h2o_prefill.vllm, "runner", runner, raising=False)
    monkeypatch.setattr(counters, "show", lambda: None)
    monkeypatch.setenv("H2O_PREFILL_SETTINGS", "recommended")
    return modules, done


def lines_of(fake, caplog, *version):
    """Register the plugin in a version; return what it logs."""
    number = ".".join(map(str, version))
    fake[0]["vllm"].version = SimpleNamespace(__version__=number, __version_tuple__=version)
    register.__wrapped__()
    return caplog.messages


@pytest.mark.parametrize(
    ("version", "lines"),
    [
        ((0, 29, 1), ["h2o_prefill: it does nothing in vLLM 0.29.1: it is older than 0.30"]),
        ((0, 30, 0), []),
        ((0, 33, 2, "dev1"), []),
        ((0, 34, 0), ["h2o_prefill: vLLM 0.34.0 is newer than 0.33, not tested"]),
    ],
)
def test_versions(fake, caplog, version, lines):
    assert lines_of(fake, caplog, *version) == lines
    assert fake[1] == ([] if version < (0, 30) else REGISTERED["cpu"])


@pytest.mark.parametrize(
    ("platform", "variable", "info", "line"),
    [
        ("cuda", "1", {"cuda_archs": "9.0a"}, None),
        ("cuda", "1", {}, "it was built without CUDA"),
        ("cuda", "0", {}, "not run on a GPU yet, H2O_PREFILL_CUDA=1 switches it on"),
        ("xpu", "1", {}, "it is for CPUs and CUDA alone"),
    ],
)
def test_platforms(fake, caplog, monkeypatch, platform, variable, info, line):
    platforms = fake[0]["vllm.platforms"].current_platform
    platforms.is_cpu, platforms.is_cuda = lambda: False, lambda: platform == "cuda"
    monkeypatch.setattr(h2o_prefill, "build_info", lambda: info)
    monkeypatch.setenv("H2O_PREFILL_CUDA", variable)
    lines = [f"h2o_prefill: it does nothing in vLLM 0.33.0: {line}"] if line else []
    assert lines_of(fake, caplog, 0, 33, 0) == lines
    assert fake[1] == ([] if line else REGISTERED["cuda"])


@pytest.mark.parametrize("version", [(0, 32, 0), (0, 40, 0)])
@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ("vllm.v1.engine.core", None, "vllm.v1.engine.core.EngineCore is missing"),
        (SPLIT.rpartition(".")[0], None, f"{SPLIT.rpartition('.')[0]} is missing"),
        (SPLIT, None, f"{SPLIT} is missing"),
        (SPLIT, "self, request", f"{SPLIT} takes (self, request), expected (self, request, num_"),
        ("vllm.config.SchedulerConfig.max_num_seqs", None, "SchedulerConfig.max_num_seqs is missi"),
        ("vllm.exceptions.VLLMValidationError", "text", "takes (text), expected (message, ...)"),
    ],
)
def test_what_is_missing_or_has_changed_is_one_line(
    fake, caplog, monkeypatch, version, place, value, message
):
    owner, _, name = place.rpartition(".")
    module, _, kind = owner.rpartition(".")
    if place in fake[0]:
        monkeypatch.setitem(sys.modules, place, None)
    else:
        holder = fake[0].get(owner) or getattr(fake[0][module], kind)
        (setattr if value else delattr)(holder, name, *([function(value)] if value else []))
    (line,) = lines_of(fake, caplog, *version)
    assert "it does nothing" in line and message in line and "\n" not in line
    assert fake[1] == []


def test_what_other_parameters_may_follow():
    for expected, allowed, others in [
        ("a, b", ["a, b"], ["a", "b, a", "a, b, c=1"]),
        ("a, ...", ["a", "a, b=1", "a, *args, **more"], ["b", "a, b", "a, *, b"]),
        ("a, *", ["a", "a, b", "a, b=1"], ["", "b, a"]),
        ("", [""], ["a", "a=1"]),
    ]:
        for text in allowed + others:
            got = contract._other_signature(eval(f"lambda {text}: None"), expected)
            assert (got is None) == (text in allowed), (expected, text)


def test_what_an_object_sets_of_itself_counts():
    class Kind:
        def __init__(self):
            self.field = 1

    assert contract._has(Kind, "field") and not contract._has(Kind, "other")
