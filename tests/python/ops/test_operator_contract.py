"""PyTorch's requirements for every operator: opcheck, torch.compile, the meta device, gradients."""

import copy
import inspect

import pytest
import torch
import torch._dynamo.testing
from op_testing import Shape, make_qkv
from random_calls.calls import arguments_of
from random_calls.descriptions import Floats
from random_calls.examples import FIXED, SETTINGS, SIZES, named_call
from random_calls.operators import TENSORS
from torch import Tensor

from h2o_prefill import PrefillConfig, ops

OPS = torch.ops.h2o_prefill
SLOW = pytest.mark.slow
SHORT = SIZES | {"T": 40, "P": 9}
RECALLING = SETTINGS | {"chunk_size": 16, "local_window": 3, "heavy_budget": 4, "recall": 2}


def schema_of(name):
    return getattr(OPS, name).default._schema.arguments


def sample_call(name, dtype="float32", layout="transposed", **fixed):
    """A small call of an operator, without a tensor that it can do without."""
    optional = {"errors": None, "sinks": None, "token_text": None, "causal": True}
    # Tracing compares what has been cloned: no NaN.
    caches = {
        "cache_key": Floats((1, 2, 60, 16), dtype),
        "cache_value": Floats((1, 2, 60, 24), dtype),
    }
    problem = {"sizes": SHORT, "dtype": dtype, "layout": layout, "settings": RECALLING}
    problem["fixed"] = FIXED | {"chunk_size": 16, "window": 7} | optional | caches | fixed
    return named_call(name, "sample", problem)


def sample(name, *given, **fixed):
    return arguments_of(sample_call(name, *given, **fixed))


def has(name, argument):
    return any(x.name == argument for x in schema_of(name))


PAGED = "paged_sparse_attention_"  # its schema has the documentation
# The results of these are in the arguments.
IN_PLACE = [name for name in TENSORS if name.endswith("_")]
WITHOUT_FLOATS = ["select_memory", "lexical_recall", "recall_at_position", "advance_position_"]
WITHOUT_FLOATS += ["packed_embedding"]
DIFFERENTIABLE = ["chunkwise_linear_attention"]
INFERENCE_ONLY = [n for n in TENSORS if n not in WITHOUT_FLOATS + DIFFERENTIABLE]
FAST = ("test_schema", "test_faketensor")  # without tracing by AOTAutograd
WHOLE = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)


@pytest.mark.parametrize("name", TENSORS)
@pytest.mark.parametrize(
    ("dtype", "layout", "tests"),
    [
        ("float32", "transposed", WHOLE),
        ("float64", "contiguous", FAST),  # the composite versions
        pytest.param("float32", "sliced", WHOLE, marks=SLOW),
        pytest.param("bfloat16", "transposed", WHOLE, marks=SLOW),
        pytest.param("float16", "sliced", WHOLE, marks=SLOW),
    ],
)
def test_opcheck(name, dtype, layout, tests):
    operator = getattr(OPS, name)
    torch.library.opcheck(operator, sample(name, dtype, layout), test_utils=tests)
    if has(name, "sinks") and tests is FAST:
        arguments = sample(name, "float32", sinks=Floats((4,)), softcap=2.0)
        torch.library.opcheck(operator, arguments, test_utils=tests)


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_opcheck_with_gradients(name):
    arguments = [x.requires_grad_() if isinstance(x, Tensor) else x for x in sample(name)]
    torch.library.opcheck(getattr(OPS, name), arguments)


@pytest.mark.parametrize(
    "name", [n for n in TENSORS if n.endswith(("attention", "attention_")) and n != PAGED]
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_models_reshape_the_output_without_a_copy(name, dtype):
    result = getattr(OPS, name)(*sample(name, dtype))
    out = result if isinstance(result, Tensor) else result[0]
    assert out.shape == (1, 4, 40, 24) and out.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("name", [x for x in TENSORS if not x.endswith("_backward") and x != PAGED])
def test_documented_function_is_the_operator(name):
    """It has the names and defaults of the schema, and takes settings as an object."""
    parameters = inspect.signature(getattr(ops, name)).parameters.values()
    defaults = [None if p.default is p.empty else p.default for p in parameters]
    assert [p.name for p in parameters] == [x.name for x in schema_of(name)]
    assert defaults == [x.default_value for x in schema_of(name)]
    arguments = sample(name)
    objects = [PrefillConfig.parse(x) if isinstance(x, str) and "," in x else x for x in arguments]
    actual = getattr(ops, name)(*copy.deepcopy(objects))
    torch.testing.assert_close(actual, getattr(OPS, name)(*arguments), rtol=0, atol=0)


@pytest.mark.parametrize("name", IN_PLACE)
def test_what_changes_in_place_has_a_new_version(name):
    arguments = sample(name)
    before = [getattr(x, "_version", None) for x in arguments]
    getattr(OPS, name)(*arguments)
    for declared, argument, version in zip(schema_of(name), arguments, before, strict=True):
        if isinstance(argument, Tensor):
            assert (argument._version > version) == declared.is_write, declared.name


@pytest.mark.parametrize("name", INFERENCE_ONLY)
def test_an_input_with_a_gradient_or_a_tangent_is_refused(name):
    operator, (first, *others) = getattr(OPS, name), sample(name)
    refusal = f"{name} is for inference and has no "
    given = [x.name for x in schema_of(name)]
    with pytest.raises(RuntimeError, match=f"{refusal}gradient"):
        operator(first.clone().requires_grad_(), *others)
    if "sinks" in given:
        arguments = dict(zip(given, (first, *others), strict=True))
        with pytest.raises(RuntimeError, match=f"{refusal}gradient"):
            operator(**(arguments | {"sinks": torch.zeros(4, requires_grad=True)}))
    with torch.no_grad(), torch.autograd.forward_ad.dual_level():
        operator(first.clone().requires_grad_(), *others)
        dual = torch.autograd.forward_ad.make_dual(first, torch.ones_like(first))
        with pytest.raises(RuntimeError, match=f"{refusal}forward-mode"):
            operator(dual, *others)
        operator(torch.autograd.forward_ad.unpack_dual(dual).primal, *others)
    with torch.inference_mode():
        operator(first.clone().requires_grad_(), *others)


def test_the_layer_takes_what_the_operator_takes():
    """By the same names in the same order, so that one tuple serves both."""
    names = [x.name for x in schema_of("prefill_attention_")]
    options = names[names.index("layer") : names.index("window") + 1]
    schemas = torch._C._jit_get_custom_class_schemas()
    of_layer = {x.name: x for x in schemas if ".LayerState" in str(x)}
    for method, others in (("attend", ["total"]), ("attend_history", [])):
        arguments = [x.name for x in of_layer[method].arguments]
        assert arguments[arguments.index("layer") :] == options + others


SETTINGS_TEXT = PrefillConfig(**RECALLING).to_string()


def prefill(q, k, v):
    out, scores, *_ = OPS.chunked_sparse_attention(q * 1.0, k, v, *[None] * 5, 0, SETTINGS_TEXT)
    return out.transpose(1, 2).reshape(q.shape[0], q.shape[2], -1) + 1.0, scores


def linear(q, k, v):
    decay = -(k.detach()[..., 0] ** 2)
    return ops.chunkwise_linear_attention(q * 1.0, k, v, decay, normalize=True)


@pytest.mark.parametrize("function", [prefill, linear])
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=SLOW)])
def test_compiles_into_one_graph_without_recompiling(fresh_dynamo, backend, function):
    counter = torch._dynamo.testing.CompileCounterWithBackend(backend)
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    for length in (33, 50, 128, 97, 200):
        qkv = [
            x.requires_grad_(function is linear) for x in make_qkv(Shape(1, 4, 2, length, 16, 16))
        ]
        expected, actual = function(*qkv), compiled(*qkv)
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
        if function is linear:
            expected, actual = (torch.autograd.grad(x, qkv, x) for x in (expected, actual))
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    assert counter.frame_count == 1
