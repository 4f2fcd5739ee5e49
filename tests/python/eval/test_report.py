"""What reports and `info` say of versions, machine and build, and how JSON is written."""

import json

import pytest
import torch
from op_testing import Shape, make_qkv

from h2o_prefill import ops
from h2o_prefill.eval import report


def test_numbers_that_json_lacks_become_null(tmp_path):
    values = {"a": float("nan"), "b": [float("inf"), 1.5, None], "c": (1, 2)}
    report.write_json(values, tmp_path / "v.json")
    read = json.loads((tmp_path / "v.json").read_text(), parse_constant=pytest.fail)
    assert read == {"a": None, "b": [None, 1.5, None], "c": [1, 2]}


def test_reports_name_versions_machine_and_build():
    facts = report.environment()
    assert facts["threads"] == torch.get_num_threads() and facts["cpu"]
    assert facts["library"]["torch"] in facts["torch"]


def test_operators_of_attention_have_kernels_for_cuda():
    names = [name for name in torch._C._dispatch_get_all_op_names() if "h2o_prefill::" in name]
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    with_cuda = {name.split("::")[1] for name in names if has_kernel(name, "CUDA")}
    # Others are some of PyTorch's own operators on CUDA.
    kernels = {"intra_chunk_attention", "memory_attention", "sliding_window_attention"}
    kernels |= {"chunked_sparse_attention", "prefill_attention_", "dense_attention"}
    kernels |= {"paged_sparse_attention_", "lexical_recall", "select_memory"}
    assert with_cuda == (kernels if torch.ops.h2o_prefill.has_cuda() else set())


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "float64"])
def test_linear_attention_has_kernels_but_for_float64(name):
    q, k, v = make_qkv(Shape(1, 2, 1, 20, 64, 8), getattr(torch, name))
    q.requires_grad_()
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, acc_events=True) as run:
        out, _, _ = ops.chunkwise_linear_attention(q, k, v)
        out.sum().backward()
    # Kernels multiply without PyTorch's products.
    composed = any(event.key == "aten::matmul" for event in run.key_averages())
    assert composed == (name == "float64")
