"""Switching models over and back: never half, never another model's config."""

import copy
import functools
import pickle
import warnings
from types import SimpleNamespace

import pytest
import torch
import transformers
from hf_helpers import OTHER, RECALL, SPARSE, assert_close, failing, is_off, new_cache, sparse_rows

from h2o_prefill import chunked_prefill, disable, enable, explain, preset_config
from h2o_prefill.hf import NAME, register


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_with_gives_everything_back(build, ids, implementation):
    model = build("llama", implementation)
    stock = model(ids).logits
    with enable(model, **SPARSE) as handle:
        assert handle.active and handle.config == preset_config(**SPARSE)
        assert model.config._attn_implementation == NAME
        assert not torch.equal(model(ids).logits, stock)
    assert not handle.active and is_off(model, implementation)
    assert torch.equal(model(ids).logits, stock)
    with pytest.raises(KeyError), enable(model, **SPARSE):
        raise KeyError("user code")
    assert is_off(model, implementation)


def test_it_is_on_without_with_and_can_be_switched(llama, ids):
    stock = llama(ids).logits
    with enable(llama, **OTHER):
        other = llama(ids).logits
    first = enable(llama, **SPARSE)
    sparse = llama(ids).logits
    first.disable()
    first.disable()
    assert torch.equal(llama(ids).logits, stock)
    second = enable(llama, **OTHER)
    assert not first.active and torch.equal(llama(ids).logits, other)
    first.enable()
    assert not second.active and torch.equal(llama(ids).logits, sparse)
    with first:
        assert torch.equal(llama(ids).logits, sparse)
    assert is_off(llama)
    assert not torch.equal(sparse, stock)


@pytest.mark.parametrize("wrong", [{"strict": True}, {"chunksize": 3}, {"dense_layers": (9,)}])
def test_settings_that_are_refused_leave_the_earlier_handle_as_it_was(build, ids, wrong):
    model = build("mistral", sliding_window=72)
    with enable(model, **SPARSE) as handle:
        sparse = model(ids).logits
        # No layer is sparse: the window is one chunk.
        with pytest.raises((NotImplementedError, ValueError)):
            enable(model, **{**SPARSE, "chunk_size": 72, **wrong})
        assert handle.active and handle.state.on
        assert [layer.sparse_calls for layer in handle.report()] == [1, 1]
        assert torch.equal(model(ids).logits, sparse)
    assert is_off(model)


def unpickled(model):
    """A model as another process gets it, which has not registered our functions."""
    content = pickle.dumps(model)
    with pytest.MonkeyPatch.context() as patch:
        interfaces = transformers.AttentionInterface, transformers.AttentionMaskInterface
        for interface in interfaces:
            known = {x: f for x, f in interface._global_mapping.items() if x != NAME}
            patch.setattr(interface, "_global_mapping", known)
        twin = pickle.loads(content)
        assert all(NAME in interface._global_mapping for interface in interfaces)
        return twin


@pytest.mark.parametrize("how", [copy.deepcopy, unpickled])
def test_a_copy_of_an_enabled_model_is_enabled_and_can_be_disabled(llama, ids, how):
    stock = llama(ids).logits
    with enable(llama, **SPARSE):
        sparse = llama(ids).logits
        twin = how(llama)
        assert torch.equal(twin(ids).logits, sparse)
    assert is_off(llama) and torch.equal(llama(ids).logits, stock)
    assert torch.equal(twin(ids).logits, sparse)
    disable(twin)
    assert is_off(twin) and torch.equal(twin(ids).logits, stock)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"config": SimpleNamespace(batch_decode=0)},
            "SimpleNamespace: pass a tokenizer as tokenizer=",
        ),
        ({"config": "h2o", "tokenizer": "smollm2"}, "must be a tokenizer of .*, got 'smollm2'"),
        ({"dense_layers": (0, 5)}, r"layers of dense_layers must be < 2, got \(0, 5\)"),
    ],
)
def test_wrong_arguments(llama, arguments, message):
    with pytest.raises(ValueError, match=message):
        enable(llama, **arguments)
    assert is_off(llama)
    pipeline = transformers.TextGenerationPipeline(llama, tokenizer=None)
    for function in (enable, disable, explain, chunked_prefill):
        with pytest.raises(ValueError, match="PreTrainedModel, got TextGenerationPipeline"):
            function(pipeline)


def test_set_attn_implementation_back_and_forth(llama, ids):
    stock = llama(ids).logits
    with enable(llama, **SPARSE):
        sparse = llama(ids).logits
        llama.set_attn_implementation("sdpa")
        with pytest.warns(UserWarning, match="implementation was changed after enable"):
            assert torch.equal(llama(ids).logits, stock)
        llama.set_attn_implementation(NAME)
        assert torch.equal(llama(ids).logits, sparse)
    assert is_off(llama) and torch.equal(llama(ids).logits, stock)


@pytest.mark.parametrize("how", ["by name", "from the config of an enabled one"])
def test_a_named_model_is_dense_until_it_is_enabled(build, make_ids, how):
    llama, ids = build("llama", max_position_embeddings=2048), make_ids(1, 1100)
    stock = llama(ids).logits
    if how == "by name":
        register()
        named = build("llama", NAME, max_position_embeddings=2048)
    else:
        with enable(llama, **SPARSE):
            named = transformers.LlamaForCausalLM(copy.deepcopy(llama.config)).eval()
        named.load_state_dict(llama.state_dict())
    with pytest.warns(UserWarning, match="the model is not enabled"):
        assert_close(named(ids).logits, stock, 1e-4)
    with enable(named, **SPARSE):
        named(ids)
        assert sparse_rows(named) == [1100, 1100]
    assert is_off(named, NAME)


def test_a_model_that_shares_its_config_object_is_not_dragged_along(llama, ids):
    other = transformers.LlamaForCausalLM(llama.config).eval()
    stock = other(ids).logits
    long = ids.repeat(1, 15)
    with enable(llama, **SPARSE):
        assert_close(other(ids).logits, stock)
        with pytest.warns(UserWarning, match="the model is not enabled"):
            other(long[:, :1030], use_cache=False)
        assert sum(sparse_rows(llama)) == 0
        with pytest.raises(ValueError, match="shares its config object"):
            enable(other, **SPARSE)
        llama(ids)
        assert sparse_rows(llama) == [72, 72]
    assert is_off(llama) and is_off(other)


def test_arguments_may_be_positional(llama, ids):
    with enable(llama, **RECALL):
        cache, other = new_cache(llama), new_cache(llama)
        named = llama(input_ids=ids, past_key_values=cache).logits
        assert torch.equal(llama(ids, None, None, other).logits, named)
    assert torch.equal(other.token_ids, ids)


def test_saving_an_enabled_model_saves_no_trace_of_us(llama, ids, tmp_path):
    stock = llama(ids).logits
    with enable(llama, **SPARSE):
        llama.save_pretrained(tmp_path)
    assert NAME not in (tmp_path / "config.json").read_text()
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval()
    assert_close(again(ids).logits, stock, 1e-6)


def test_wrappers_of_other_libraries_stay(llama, ids):
    """As accelerate's: one from before is called and put back, one from after calls on."""

    def wrap():
        forward = llama.forward
        wrapper = functools.wraps(forward)(lambda *args, **kwargs: forward(*args, **kwargs))
        llama.forward = wrapper
        return wrapper

    stock, before = llama(ids).logits, wrap()
    with enable(llama, **SPARSE):
        sparse = llama(ids).logits
    assert llama.forward is before and not torch.equal(sparse, stock)
    handle = enable(llama, **SPARSE)
    after = wrap()
    assert torch.equal(llama(ids).logits, sparse)
    handle.disable()
    assert llama.forward is after and torch.equal(llama(ids).logits, stock)
    handle.enable()
    assert torch.equal(llama(ids).logits, sparse)


PATIENCE = 20.0  # seconds, far more than any of these takes


@pytest.fixture
def inputs(make_ids):
    """Return a padded batch: its mask is ours or theirs, and None means another thing to each."""
    warnings.filterwarnings("ignore", message="h2o_prefill: .* hides tokens")
    batch = make_ids(2, 72)
    mask = torch.ones_like(batch)
    mask[1, :5] = 0
    return {"input_ids": batch, "attention_mask": mask}


def between_layers(model, function):
    """Call a function once, when the first layer of a forward is done."""

    def hook(*_):
        handle.remove()
        function()

    handle = model.model.layers[0].register_forward_hook(hook)


DURING = "LlamaForCausalLM must not be enabled or disabled during one of its forwards"


@pytest.mark.parametrize("other", [False, True])
@pytest.mark.parametrize("switch", [disable, lambda model: enable(model, **OTHER)])
def test_a_forward_refuses_a_switch(llama, inputs, spawn, other, switch):
    stock = llama(**inputs).logits
    enable(llama, **SPARSE)
    expected = llama(**inputs).logits

    def refused():
        with pytest.raises(RuntimeError, match=DURING):
            switch(llama)

    between_layers(llama, lambda: spawn(refused).join(PATIENCE) if other else refused())
    assert torch.equal(llama(**inputs).logits, expected)
    switch(llama)
    disable(llama)
    assert is_off(llama) and torch.equal(llama(**inputs).logits, stock)


@pytest.mark.parametrize(
    ("name", "implementation"), [("llama", "sdpa"), ("gemma3", "eager"), ("gpt-oss", "eager")]
)
def test_enabled_by_another_thread(build, inputs, spawn, name, implementation):
    model = build(name, implementation)
    stock = model(**inputs).logits
    between_layers(model, lambda: spawn(lambda: enable(model, **SPARSE)).join(PATIENCE))
    assert_close(model(**inputs).logits, stock)
    assert not is_off(model)
    disable(model)


def test_an_interrupted_forward_is_over(llama, ids, spawn):
    handle = enable(llama, **SPARSE)

    def work():
        with failing(llama.model.layers[0], KeyboardInterrupt):
            llama(ids)

    work()
    handle.disable()
    handle.enable()
    spawn(work).join(PATIENCE)  # of a thread that has ended
    handle.disable()
    assert is_off(llama)
