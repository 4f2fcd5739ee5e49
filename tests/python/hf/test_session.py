"""Session files: a prompt goes on as if it had never been saved; what does not fit is one line."""

import pickle
import warnings

import pytest
import torch
from hf_helpers import (
    EVERYTHING,
    GREEDY,
    H2O,
    LETTERS,
    RECALL,
    RECOMMENDED,
    SPARSE,
    in_calls,
    new_cache,
)

from h2o_prefill import ChunkedPrefillCache, PrefillConfig, PrefixCache, enable
from h2o_prefill.fingerprint import fingerprint
from h2o_prefill.session import Session

# Sparse, decoded, short.
CALLS = (64, 1, 1, 6)
CHARACTERS = {**RECALL, "recall_characters": 3}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "prompt.safetensors"


def saved_prompt(model, ids, path):
    """Prefill a prompt and save it; return its cache."""
    cache = new_cache(model)
    in_calls(model, cache, ids[:, : sum(CALLS)], CALLS)
    cache.save(path, model)
    return cache


def assert_equal_states(one, other):
    """Compare all but the capacities."""
    for ours, theirs in zip(one.tensors()[1:], other.tensors()[1:], strict=True):
        assert torch.equal(ours, theirs)
    for name in ("length", "scored", "last_chunk_begin"):
        assert getattr(one, name) == getattr(other, name)


def assert_equal_caches(one, other):
    assert torch.equal(one.token_ids, other.token_ids)
    for ours, theirs in zip(one.layers, other.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)
        if hasattr(ours, "state"):
            assert_equal_states(ours.state, theirs.state)


@pytest.mark.parametrize(
    ("name", "dtype", "how"),
    [
        ("llama", "float32", EVERYTHING),
        ("qwen3", "bfloat16", EVERYTHING),
        ("llama", "float32", {**RECALL, "error_rows": 2}),
        ("llama", "float32", {"config": "exact"}),
        ("mistral-window", "float32", H2O),
        ("gemma2", "float32", H2O),
        ("deepseek-v3", "float32", RECALL),
    ],
)
def test_a_prompt_goes_on_to_the_bit(build, prompt, path, name, dtype, how):
    warnings.filterwarnings("ignore", message="h2o_prefill: dense attention: every layer has a")
    model = build(name).to(getattr(torch, dtype))
    with enable(model, **how):
        cache = saved_prompt(model, prompt, path)
        loaded = ChunkedPrefillCache.load(path, model)
        assert loaded.settings == cache.settings
        # Sparse again, then short and decoded.
        rest = prompt[:, sum(CALLS) :]
        sizes = (64, rest.shape[1] - 65, 1)
        assert torch.equal(
            in_calls(model, loaded, rest, sizes), in_calls(model, cache, rest, sizes)
        )
        assert_equal_caches(cache, loaded)
        again = ChunkedPrefillCache.load(path, model)
        again.save(path, model)
        turn = torch.cat([prompt[:, : sum(CALLS)], rest[:, :40]], dim=1)
        answers = [
            model.generate(turn, past_key_values=x, **GREEDY)
            for x in (again, ChunkedPrefillCache.load(path, model))
        ]
        assert torch.equal(*answers)
        cache = new_cache(model)
        in_calls(model, cache, prompt[:, : sum(CALLS)], CALLS)
        assert torch.equal(answers[0], model.generate(turn, past_key_values=cache, **GREEDY))


def test_contexts_of_cpp_have_the_same_files(build, prompt, path):
    model = build("qwen3").bfloat16()
    with enable(model, **EVERYTHING):
        cache = saved_prompt(model, prompt, path)
    native, layers = PrefillConfig.parse(cache.settings).native, len(cache.layers)
    context = torch.classes.h2o_prefill.PrefillContext(layers, 400, native)
    context.load(str(path), fingerprint(model))
    assert torch.equal(context.token_ids(), cache.token_ids)
    other = path.with_name("other")
    context.save(str(other), fingerprint(model))
    assert_equal_caches(ChunkedPrefillCache.load(other, model), cache)
    with pytest.raises(ValueError, match="must be of this model: x must be 1, got none"):
        context.load(str(path), "x=1")


def test_unknown_ids_stay_unknown(llama, ids, path):
    with enable(llama, **H2O):
        cache = new_cache(llama)
        llama(inputs_embeds=llama.get_input_embeddings()(ids), past_key_values=cache)
        cache.save(path, llama)
    assert ChunkedPrefillCache.load(path, llama).token_ids is None


def test_caches_without_a_session(llama, make_ids, path):
    cache = new_cache(llama)
    with pytest.raises(ValueError, match="filled by an enabled model"):
        cache.save(path, llama)
    with enable(llama, **SPARSE):
        llama(make_ids(2, 40), past_key_values=cache)
        with pytest.raises(OSError, match="directory"):
            cache.save(path.parent, llama)
        pickle.loads(pickle.dumps(cache)).save(path, llama)
        cache.layers[1].crop(-1)
        with pytest.raises(ValueError, match="the same tokens in every layer"):
            cache.save(path, llama)
        cache.crop(-39)
        with pytest.raises(ValueError, match="at least one"):
            cache.save(path, llama)


def test_other_settings_are_refused(llama, ids, path):
    with enable(llama, **RECALL):
        saved_prompt(llama, ids, path)
    # Neither of these makes it another model.
    llama.config.pad_token_id, llama.config.use_cache = 5, False
    cache = ChunkedPrefillCache.load(path, llama)
    with enable(llama, cache.settings):
        ChunkedPrefillCache.load(path, llama)
    with enable(llama, **SPARSE), pytest.raises(ValueError, match=r"must have the settings .*got"):
        ChunkedPrefillCache.load(path, llama)
    with pytest.raises(FileNotFoundError, match="No such file"):
        ChunkedPrefillCache.load(path.with_name("none"), llama)
    with pytest.raises(ValueError, match="cannot be read"):
        ChunkedPrefillCache.load(path.parent, llama)


def with_swapped_rows(model):
    rows = model.model.embed_tokens.weight
    rows[[5, 9]] = rows[[9, 5]].clone()
    return model


def with_one_changed(model):
    model.model.layers[1].mlp.up_proj.weight[3, 4] += 1e-6
    return model


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda build: build("qwen3"), "config must be"),
        (lambda build: build("llama", rms_norm_eps=1e-3), "config must be [0-9a-f]{16}, got"),
        (lambda build: build("llama").bfloat16(), "dtype must be bfloat16, got float32"),
        (lambda build: with_swapped_rows(build("llama")), "weights must be .*, got"),
        (lambda build: with_one_changed(build("llama")), "weights must be .*, got"),
    ],
)
def test_another_model_is_refused(build, llama, ids, path, other, message):
    with enable(llama, **RECALL):
        saved_prompt(llama, ids, path)
    with pytest.raises(ValueError, match=f"session must be of this model: {message}"):
        ChunkedPrefillCache.load(path, other(build))


def test_the_text_of_the_tokens_is_a_part_of_the_file(llama, ids, path):
    with enable(llama, **CHARACTERS, tokenizer=LETTERS):
        cache = saved_prompt(llama, ids, path)
        ChunkedPrefillCache.load(path, llama)
    ChunkedPrefillCache.load(path, llama)
    with enable(llama, cache.settings), pytest.raises(ValueError, match="tokenizer must be none"):
        ChunkedPrefillCache.load(path, llama)


@pytest.fixture
def adapted(llama):
    """The model with two adapters; "one" is active."""
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "k_proj"], init_lora_weights=False, r=2)
    model = peft.get_peft_model(llama, config, "one")
    model.add_adapter("two", config)
    return model.eval()


@pytest.mark.parametrize("inner", [False, True])
def test_active_adapters_are_a_part_of_a_cache(adapted, ids, path, inner):
    model = adapted.base_model.model if inner else adapted
    longer = torch.cat([ids, ids], dim=1)
    with enable(model, **SPARSE):
        saved_prompt(model, ids, path)
        store = PrefixCache(1 << 30)
        store.prefill(model, longer)

        def is_known():
            return store.prefill(model, longer)[1] == 128

        def check_refused():
            assert not is_known()
            with pytest.raises(ValueError, match=r"of this model: adapters must be .*, got"):
                ChunkedPrefillCache.load(path, model)

        assert is_known()
        adapted.set_adapter("two")
        check_refused()
        adapted.set_adapter("one")
        assert is_known()
        with adapted.disable_adapter():
            check_refused()
        assert is_known()
        assert ChunkedPrefillCache.load(path, model).get_seq_length() == sum(CALLS)
        attention = adapted.base_model.model.model.layers[0].self_attn
        attention.k_proj.lora_A["one"].weight.mul_(2)
        check_refused()
        attention.k_proj.lora_A["one"].weight.div_(2)
        assert is_known()
        adapted.base_model.merge_adapter()
        assert not is_known()
        with pytest.raises(ValueError, match=r"of this model: weights must be"):
            ChunkedPrefillCache.load(path, model)


def test_changed_weights_are_seen(llama, ids):
    store = PrefixCache(1 << 30)
    with enable(llama, **SPARSE):
        store.prefill(llama, ids)
        before, norm = fingerprint(llama), llama.model.norm
        assert fingerprint(llama) == before and store.prefill(llama, ids)[1] == 64
        norm.weight.mul_(1.5)
        changed = fingerprint(llama)
        assert changed != before and store.prefill(llama, ids)[1] == 0
        norm.weight = torch.nn.Parameter(norm.weight.div(1.5), requires_grad=False)
        assert fingerprint(llama) == before and store.prefill(llama, ids)[1] == 64


@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization is deprecated")
def test_packed_weights_are_a_part_of_the_file(build, ids, path):
    def quantized(change=0.0, part="weight"):
        model = build("qwen2")
        getattr(model.model.layers[1].self_attn.k_proj, part)[3] += change
        return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear})

    model = quantized()
    with enable(model, **RECALL):
        saved_prompt(model, ids, path)
    ChunkedPrefillCache.load(path, quantized())
    for part in ("weight", "bias"):
        with pytest.raises(ValueError, match=r"weights must be .*, got"):
            ChunkedPrefillCache.load(path, quantized(0.1, part))


def test_an_offloaded_model_has_a_session(build, llama, ids, path):
    accelerate = pytest.importorskip("accelerate")
    with enable(llama, **RECALL):
        saved_prompt(llama, ids, path)
    other = accelerate.cpu_offload(build("llama"), execution_device="cpu")
    with enable(other, **RECALL):
        assert ChunkedPrefillCache.load(path, other).get_seq_length() == sum(CALLS)
    assert fingerprint(other) == fingerprint(llama)


VARIANTS = (
    H2O,
    {"config": "exact"},
    RECOMMENDED,
    EVERYTHING,
    {**SPARSE, "chunk_size": 32, "local_window": 8},
    {**SPARSE, "local_window": 2, "heavy_budget": 2},
    {**SPARSE, "min_prefill": 200},
)


@pytest.mark.parametrize("first", range(len(VARIANTS)))
@pytest.mark.parametrize("step", range(3))
@pytest.mark.parametrize("length", [1, 48])
def test_a_prompt_of_two_settings_has_those_that_built_its_state(
    llama, prompt, path, first, step, length
):
    first, second = VARIANTS[first], VARIANTS[(first + step) % len(VARIANTS)]
    cache = new_cache(llama)
    with enable(llama, **first) as handle:
        llama(prompt[:, :70], past_key_values=cache)
        settings = [handle.config.to_string()]
    with enable(llama, **second) as handle:
        llama(prompt[:, 70 : 70 + length], past_key_values=cache)
        sparse = handle.report().layers[1].sparse_calls
        settings.append(handle.config.to_string())
    cache.save(path, llama)
    assert cache.settings == settings[1 if sparse else 0]
    with enable(llama, cache.settings):
        loaded = ChunkedPrefillCache.load(path, llama)
        rest = prompt[:, 70 + length :]
        ours, theirs = (in_calls(llama, x, rest, (rest.shape[1],)) for x in (loaded, cache))
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    "change",
    [
        {"settings": "not\none line"},
        {"fingerprint": "another"},
        {"token_ids": torch.zeros(1, 71, dtype=torch.long)},
        {"layers": []},
        {"layers": [torch.classes.h2o_prefill.LayerState(False)] * 2},
    ],
)
def test_what_does_not_fit_is_refused(llama, ids, path, change):
    with enable(llama, **RECALL):
        saved_prompt(llama, ids, path)
    Session.load(path)._replace(**change).save(path)
    with pytest.raises(ValueError, match=f"^session '{path}' cannot be (read|used): .+") as caught:
        ChunkedPrefillCache.load(path, llama)
    assert "\n" not in str(caught.value)


def test_damaged_and_foreign_files_are_refused(llama, ids, path):
    with enable(llama, **RECALL):
        cache = saved_prompt(llama, ids, path)
    whole = path.read_bytes()
    middle = whole.index(cache.layers[0].keys.contiguous().numpy().tobytes()) + 100
    torch.save({"weight": torch.zeros(3)}, path)
    foreign = path.read_bytes()
    damaged = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
    for content in (foreign, damaged, whole[:middle], b"", b"text"):
        path.write_bytes(content)
        with pytest.raises(ValueError, match="it is no session file, or is damaged"):
            ChunkedPrefillCache.load(path, llama)
