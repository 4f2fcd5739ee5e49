"""Switching models over and back: never half, never another model's config."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading

import pytest
import torch

from h2o_prefill import PRESETS, ChunkedPrefillCache, PrefillConfig, disable, enable, preset_config
from h2o_prefill.hf import NAME, register
from h2o_prefill.hf.state import DEFAULT_STATE

SPARSE = {"chunk_size": 16, "local_window": 4, "heavy_budget": 4}
OTHER = {"chunk_size": 32, "local_window": 4, "heavy_budget": 4}


def is_untouched(model, implementation="sdpa"):
    """Return whether a model carries none of our hooks and its old attention."""
    hooks = [m for m in model.modules() if m._forward_pre_hooks or m._forward_hooks]
    return not hooks and model.config._attn_implementation == implementation


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_with_gives_everything_back(build, ids, implementation):
    model = build("llama", implementation)
    stock = model(ids).logits
    with enable(model, **SPARSE) as handle:
        assert handle.active and handle.config == preset_config(**SPARSE)
        assert model.config._attn_implementation == NAME
        assert not torch.equal(model(ids).logits, stock)
    assert not handle.active and is_untouched(model, implementation)
    assert torch.equal(model(ids).logits, stock)


def test_it_is_on_without_with_and_can_be_switched(llama, ids):
    stock = llama(ids).logits
    handle = enable(llama, **SPARSE)
    sparse = llama(ids).logits
    handle.disable()
    handle.disable()
    assert torch.equal(llama(ids).logits, stock)
    handle.enable()
    assert torch.equal(llama(ids).logits, sparse)
    with handle:
        assert torch.equal(llama(ids).logits, sparse)
    assert is_untouched(llama)
    assert not torch.equal(sparse, stock)


def test_enabling_again_replaces_the_settings(llama, ids):
    with enable(llama, **OTHER):
        other = llama(ids).logits
    first = enable(llama, **SPARSE)
    sparse = llama(ids).logits
    second = enable(llama, **OTHER)
    assert not first.active and torch.equal(llama(ids).logits, other)
    first.enable()
    assert not second.active and torch.equal(llama(ids).logits, sparse)
    first.disable()
    assert is_untouched(llama)


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
    assert is_untouched(model)


def test_a_handle_that_is_refused_keeps_off_another_model(llama, build, ids):
    import transformers

    other = transformers.LlamaForCausalLM(llama.config).eval()
    with enable(llama, **SPARSE):
        sparse = llama(ids).logits
        with pytest.raises(ValueError, match="shares its config object"):
            enable(other, **SPARSE)
        assert torch.equal(llama(ids).logits, sparse)
    assert is_untouched(llama) and is_untouched(other)


def test_a_handle_is_entered_once(llama):
    with (
        enable(llama, **SPARSE) as handle,
        pytest.raises(ValueError, match="entered already"),
        handle,
    ):
        pass
    assert is_untouched(llama)


def test_disable_needs_no_handle(llama, ids):
    stock = llama(ids).logits
    handle = enable(llama, **SPARSE)
    disable(llama)
    assert not handle.active and is_untouched(llama)
    assert torch.equal(llama(ids).logits, stock)
    disable(llama)


def test_a_copy_of_an_enabled_model_is_enabled_and_can_be_disabled(llama, ids):
    stock = llama(ids).logits
    with enable(llama, **SPARSE):
        sparse = llama(ids).logits
        twin = copy.deepcopy(llama)
    assert torch.equal(llama(ids).logits, stock)
    assert torch.equal(twin(ids).logits, sparse)
    disable(twin)
    assert is_untouched(twin) and torch.equal(twin(ids).logits, stock)


def test_an_enabled_model_is_unpickled_enabled_in_another_process(llama, ids, tmp_path):
    with enable(llama, **SPARSE):
        torch.save((llama, ids, llama(ids).logits), tmp_path / "model.pt")
    program = (
        "import sys, torch, h2o_prefill\n"
        "model, ids, sparse = torch.load(sys.argv[1], weights_only=False)\n"
        "with torch.no_grad(): assert torch.equal(model(ids).logits, sparse)\n"
        "h2o_prefill.disable(model)\n"
        "with torch.no_grad(): assert not torch.equal(model(ids).logits, sparse)\n"
    )
    subprocess.run([sys.executable, "-c", program, tmp_path / "model.pt"], check=True)


def test_a_model_built_from_the_config_of_an_enabled_one_is_dense(llama, ids, monkeypatch):
    import transformers

    monkeypatch.setattr(DEFAULT_STATE, "reported", set())
    with enable(llama, **SPARSE):
        config = copy.deepcopy(llama.config)
    other = transformers.LlamaForCausalLM(config).eval()
    other.load_state_dict(llama.state_dict())
    long = ids.repeat(1, 15)[:, :1100]
    with pytest.warns(UserWarning, match="the model is not enabled"):
        ours = other(long).logits
    torch.testing.assert_close(ours, llama(long).logits, atol=1e-4, rtol=1e-4)


def test_a_model_that_does_not_use_the_interface_is_named(build, ids):
    model = build("bloom")
    before = model(ids).logits
    with pytest.raises(ValueError, match="BloomForCausalLM"):
        enable(model, **SPARSE)
    assert is_untouched(model, model.config._attn_implementation)
    assert torch.equal(model(ids).logits, before)


def test_wrong_arguments(llama):
    with pytest.raises(ValueError, match="PreTrainedModel, got Linear"):
        enable(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"config must be .* the name of a preset, got dict"):
        enable(llama, {"chunk_size": 16})
    with pytest.raises(ValueError, match='"chunksize" is no setting'):
        enable(llama, chunksize=16)
    with pytest.raises(ValueError, match="local_window must be >= 0, got -3"):
        enable(llama, local_window=-3)
    with pytest.raises(ValueError, match=r"dense_layers must be < 2, got \(2,\)"):
        enable(llama, dense_layers=(2,))
    with pytest.raises(ValueError, match=r"wide_layers must be < 2, got \(0, 5\)"):
        enable(llama, wide_layers=(0, 5))
    with pytest.raises(ValueError, match='preset must be one of h2o, recommended, got "sp"'):
        enable(llama, "sp")
    assert is_untouched(llama)


def test_a_preset_and_overrides(llama):
    with enable(llama, "h2o", **SPARSE) as handle:
        assert handle.config == PrefillConfig(**SPARSE)
    with enable(llama) as handle:
        assert handle.config == PRESETS["recommended"] != PRESETS["h2o"]


def test_a_config_and_overrides(llama):
    base = PrefillConfig(chunk_size=64, local_window=8, heavy_budget=8)
    with enable(llama, base, heavy_budget=2) as handle:
        assert handle.config == base.replace(heavy_budget=2)


def test_an_exception_inside_the_forward_restores_everything(llama, ids):
    with enable(llama, **SPARSE):
        cache = ChunkedPrefillCache(config=llama.config)
        llama(ids[:, :32], past_key_values=cache)
        before = copy.deepcopy(cache)
        expected = llama(ids[:, 32:], past_key_values=copy.deepcopy(cache)).logits

        def fail(*_):
            raise RuntimeError("in the second layer")

        hook = llama.model.layers[1].mlp.register_forward_pre_hook(fail)
        with pytest.raises(RuntimeError, match="in the second layer"):
            llama(ids[:, 32:], past_key_values=cache)
        hook.remove()
        for ours, old in zip(cache.layers, before.layers, strict=True):
            assert torch.equal(ours.keys, old.keys) and torch.equal(ours.values, old.values)
            assert torch.equal(ours.state.scores, old.state.scores)
            assert ours.state.length == 32
        assert torch.equal(cache.token_ids, before.token_ids)
        assert torch.equal(llama(ids[:, 32:], past_key_values=cache).logits, expected)
    assert is_untouched(llama)


def test_an_exception_in_a_mixed_model_restores_sliding_layers_and_empty_caches(build, ids):
    model = build("gemma3")
    with enable(model, **SPARSE):
        fresh = ChunkedPrefillCache(config=model.config)
        cache = ChunkedPrefillCache(config=model.config)
        model(ids[:, :32], past_key_values=cache)
        expected = model(ids[:, 32:], past_key_values=copy.deepcopy(cache)).logits
        norm = model.model.norm
        hook = norm.register_forward_hook(lambda *_: 1 / 0)
        for each, part in ((cache, ids[:, 32:]), (fresh, ids)):
            with pytest.raises(ZeroDivisionError):
                model(part, past_key_values=each)
        hook.remove()
        assert fresh.get_seq_length() == 0 and cache.get_seq_length() == 32
        assert torch.equal(model(ids[:, 32:], past_key_values=cache).logits, expected)
        assert torch.equal(model(ids, past_key_values=fresh).logits, model(ids).logits)


def test_an_exception_leaves_a_cache_without_layers_without_layers(llama, ids):
    with enable(llama, **SPARSE):
        cache = ChunkedPrefillCache()
        hook = llama.model.norm.register_forward_hook(lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            llama(ids, past_key_values=cache)
        hook.remove()
        assert len(cache) == 0
        assert torch.equal(llama(ids, past_key_values=cache).logits, llama(ids).logits)


def test_an_exception_leaves_the_with(llama):
    with pytest.raises(KeyError), enable(llama, **SPARSE):
        raise KeyError("user code")
    assert is_untouched(llama)


def test_an_interrupt_inside_the_forward_is_cleaned_up(llama, ids):
    cache = ChunkedPrefillCache(config=llama.config)

    def interrupt(*_):
        raise KeyboardInterrupt

    with enable(llama, **SPARSE) as handle:
        expected = llama(ids).logits
        hook = llama.model.layers[1].mlp.register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            llama(ids, past_key_values=cache)
        hook.remove()
        assert torch.equal(llama(ids).logits, expected)
        hook = llama.model.layers[1].mlp.register_forward_pre_hook(interrupt)
        cache.reset()
        with pytest.raises(KeyboardInterrupt):
            llama(ids, past_key_values=cache)
        hook.remove()
        handle.disable()
        assert cache.get_seq_length() == 0
    assert is_untouched(llama)


def test_set_attn_implementation_back_and_forth(llama, ids, sparse_layers):
    stock = llama(ids).logits
    with enable(llama, **SPARSE):
        sparse = llama(ids).logits
        llama.set_attn_implementation("sdpa")
        with pytest.warns(UserWarning, match="implementation was changed after enable"):
            assert torch.equal(llama(ids).logits, stock)
        llama.set_attn_implementation(NAME)
        assert torch.equal(llama(ids).logits, sparse)
    assert is_untouched(llama) and torch.equal(llama(ids).logits, stock)


def test_by_name_alone_a_model_is_dense_until_it_is_enabled(
    build, make_ids, sparse_layers, monkeypatch
):
    monkeypatch.setattr(DEFAULT_STATE, "reported", set())
    ids = make_ids(1, 1100)
    stock = build("llama", max_position_embeddings=2048)(ids).logits
    register()
    named = build("llama", NAME, max_position_embeddings=2048)
    with pytest.warns(UserWarning, match="the model is not enabled"):
        torch.testing.assert_close(named(ids).logits, stock, atol=1e-4, rtol=1e-4)
    assert sparse_layers == []
    with enable(named, **SPARSE):
        named(ids)
    assert sparse_layers == [1100, 1100]
    assert is_untouched(named, NAME)


@pytest.mark.parametrize("name", ["llama", "gpt-oss", "gemma2", "gemma3"])
def test_by_name_alone_short_calls_and_decoding_equal_stock(build, make_ids, name):
    ids = make_ids(2, 40)
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    arguments = {"max_new_tokens": 6, "do_sample": False}
    stock = build(name)
    register()
    named = build(name, NAME)
    assert torch.equal(named.generate(ids, **arguments), stock.generate(ids, **arguments))
    assert torch.equal(
        named.generate(ids, attention_mask=mask, **arguments),
        stock.generate(ids, attention_mask=mask, **arguments),
    )


def test_two_models_with_two_configs(build, ids):
    one, two = build("llama"), build("qwen3")
    with enable(one, **SPARSE):
        alone = one(ids).logits
    with enable(two, chunk_size=32, local_window=2, heavy_budget=6):
        also_alone = two(ids).logits
    with enable(one, **SPARSE), enable(two, chunk_size=32, local_window=2, heavy_budget=6):
        for _ in range(2):
            assert torch.equal(one(ids).logits, alone)
            assert torch.equal(two(ids).logits, also_alone)


def test_a_model_that_shares_its_config_object_is_not_dragged_along(
    llama, ids, sparse_layers, monkeypatch
):
    import transformers

    monkeypatch.setattr(DEFAULT_STATE, "reported", set())
    other = transformers.LlamaForCausalLM(llama.config).eval()
    stock = other(ids).logits
    long = ids.repeat(1, 15)
    with enable(llama, **SPARSE):
        torch.testing.assert_close(other(ids).logits, stock, atol=1e-5, rtol=1e-5)
        with pytest.warns(UserWarning, match="the model is not enabled"):
            other(long[:, :1030], use_cache=False)
        assert sparse_layers == []
        with pytest.raises(ValueError, match="shares its config object"):
            enable(other, **SPARSE)
        llama(ids)
        assert sparse_layers == [72, 72]


def test_the_base_model_and_the_head_behave_alike(llama, ids):
    with enable(llama, **SPARSE):
        hidden = llama.model(ids).last_hidden_state
        assert torch.equal(llama.lm_head(hidden), llama(ids).logits)


def test_arguments_may_be_positional(llama, ids):
    with enable(llama, recall=2, recall_block=8, **SPARSE):
        cache, other = (ChunkedPrefillCache(config=llama.config) for _ in range(2))
        named = llama(input_ids=ids, past_key_values=cache).logits
        assert torch.equal(llama(ids, None, None, other).logits, named)
    assert torch.equal(other.token_ids, ids)


def test_two_threads_with_two_models(build, make_ids):
    settings = [SPARSE, {"chunk_size": 24, "local_window": 3, "heavy_budget": 5, "sink_tokens": 1}]
    models = [build("llama"), build("qwen3")]
    prompts = [[make_ids(1, 72, seed=10 * i + j) for j in range(4)] for i in range(2)]
    handles = [enable(m, **s) for m, s in zip(models, settings, strict=True)]
    expected = [[m(p).logits for p in ps] for m, ps in zip(models, prompts, strict=True)]
    for got, want in zip(run_in_threads(models, prompts), expected, strict=True):
        for a, b in zip(got, want, strict=True):
            assert torch.equal(a, b)
    for handle in handles:
        handle.disable()


def test_two_threads_with_one_model(llama, make_ids):
    prompts = [[make_ids(1, 72 + i, seed=10 * i + j) for j in range(4)] for i in range(2)]
    with enable(llama, recall=2, recall_block=8, **SPARSE):
        expected = [[llama(p).logits for p in ps] for ps in prompts]
        for got, want in zip(run_in_threads([llama, llama], prompts), expected, strict=True):
            for a, b in zip(got, want, strict=True):
                assert torch.equal(a, b)


def run_in_threads(models, prompts):
    """Run every model on its prompts, all at once; logits by model."""
    start, results, errors = threading.Barrier(len(models)), [[] for _ in models], []

    def work(index):
        try:
            with torch.no_grad():
                start.wait()
                results[index] = [models[index](prompt).logits for prompt in prompts[index]]
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(models))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    return results


def test_two_prompts_through_one_handle_equal_two_fresh_ones(llama, make_ids):
    prompts = [make_ids(1, 72), make_ids(1, 90, seed=4)]
    fresh = []
    for prompt in prompts:
        with enable(llama, recall=2, recall_block=8, **SPARSE):
            fresh.append(llama(prompt).logits)
    with enable(llama, recall=2, recall_block=8, **SPARSE):
        for _ in range(2):
            for prompt, expected in zip(prompts, fresh, strict=True):
                assert torch.equal(llama(prompt).logits, expected)


@pytest.mark.parametrize("how", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_a_copy_of_an_enabled_model_works_by_itself(llama, ids, how):
    with enable(llama, **SPARSE):
        expected = llama(ids).logits
        other = how(llama)
        assert torch.equal(other(ids).logits, expected)
    assert is_untouched(llama)
    assert torch.equal(other(ids).logits, expected)


def test_saving_an_enabled_model_saves_no_trace_of_us(llama, ids, tmp_path):
    import transformers

    stock = llama(ids).logits
    with enable(llama, **SPARSE):
        llama.save_pretrained(tmp_path)
    assert NAME not in (tmp_path / "config.json").read_text()
    again = transformers.LlamaForCausalLM.from_pretrained(tmp_path).eval()
    torch.testing.assert_close(again(ids).logits, stock, atol=1e-6, rtol=1e-6)


def test_importing_the_package_does_not_import_transformers():
    code = "import sys, h2o_prefill; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
