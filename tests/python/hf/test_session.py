"""Session files: a prompt goes on as if it had never been saved; a damaged file is one line."""

import json
import os
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
from safetensors import safe_open
from safetensors.torch import save_file

from h2o_prefill import ChunkedPrefillCache, PrefillConfig, PrefixCache, disable, enable
from h2o_prefill.identity import model_text

KEY = "h2o_prefill.session"
# Sparse, decoded, short.
CALLS = (64, 1, 1, 6)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "prompt.safetensors"


def saved_prompt(model, ids, path):
    """Prefill a prompt and save it; return its cache."""
    cache = new_cache(model)
    in_calls(model, cache, ids[:, : sum(CALLS)], CALLS)
    cache.save(path)
    return cache


def contents(path):
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name).clone() for name in file.keys()}, file.metadata()  # noqa: SIM118


def assert_equal_caches(one, other):
    assert torch.equal(one.token_ids, other.token_ids)
    for ours, theirs in zip(one.layers, other.layers, strict=True):
        assert torch.equal(ours.keys, theirs.keys) and torch.equal(ours.values, theirs.values)
        state, other_state = (getattr(layer, "state", None) for layer in (ours, theirs))
        assert (state is None) == (other_state is None)
        if state is not None:
            for name in ("scores", "memory", "errors"):
                a, b = getattr(state, name), getattr(other_state, name)
                assert torch.equal(a, b[..., : a.shape[2]])
            assert state.last_chunk_begin == other_state.last_chunk_begin


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
        assert loaded.settings == cache.settings and not path.with_name("other").exists()
        loaded.save(path.with_name("other"))
        assert path.read_bytes() == path.with_name("other").read_bytes()
        # Sparse again, then short and decoded.
        rest = prompt[:, sum(CALLS) :]
        sizes = (64, rest.shape[1] - 65, 1)
        assert torch.equal(
            in_calls(model, loaded, rest, sizes), in_calls(model, cache, rest, sizes)
        )
        assert_equal_caches(cache, loaded)
        # The file of a mapped cache may be replaced.
        again = ChunkedPrefillCache.load(path, model)
        again.save(path)
        turn = torch.cat([prompt[:, : sum(CALLS)], rest[:, :40]], dim=1)
        answers = [
            model.generate(turn, past_key_values=x, **GREEDY)
            for x in (again, ChunkedPrefillCache.load(path, model))
        ]
        assert torch.equal(*answers)
        cache = new_cache(model)
        in_calls(model, cache, prompt[:, : sum(CALLS)], CALLS)
        assert torch.equal(answers[0], model.generate(turn, past_key_values=cache, **GREEDY))


def test_the_form_of_the_file(build, make_ids, path):
    model = build("llama")
    with enable(model, **EVERYTHING, dense_layers=(0,)):
        cache = new_cache(model)
        in_calls(model, cache, make_ids(2, 40), (32, 8))
        cache.save(path)
    tensors, metadata = contents(path)
    header = json.loads(metadata[KEY])
    fields = PrefillConfig.parse(cache.settings).native.to_fields()
    assert list(header) == ["version", "checksum", "model", "settings", "dtype", "length"]
    assert len(header.pop("checksum")) == 16
    assert list(header.values()) == [2, model_text(model), fields, "float32", 40]
    kinds = {name: (str(x.dtype)[6:], list(x.shape)) for name, x in tensors.items()}
    keys = {
        f"layers.{layer}.{name}": ("float32", [2, 2, 40, 32])
        for layer in (0, 1)
        for name in ("key", "value")
    }
    memory_size = PrefillConfig.parse(cache.settings).of_layer(1).memory_size
    assert kinds == {
        **keys,
        "token_ids": ("int64", [2, 40]),
        "last_chunk_begin": ("int64", [2]),
        "layers.1.scores": ("float32", [2, 2, 40]),
        "layers.1.memory": ("int32", [2, 2, memory_size]),
        "layers.1.errors": ("float32", [2, 2, 4]),
    }
    assert tensors["last_chunk_begin"].tolist() == [0, 16]
    assert bool((tensors["layers.1.scores"][..., 32:] == 0).all())


def test_contexts_of_cpp_have_the_same_files(build, prompt, path):
    model = build("qwen3").bfloat16()
    with enable(model, **EVERYTHING):
        cache = saved_prompt(model, prompt, path)
    native, layers = PrefillConfig.parse(cache.settings).native, len(cache.layers)
    context = torch.classes.h2o_prefill.PrefillContext(layers, 100, native)
    context.load(str(path), model_text(model))
    assert torch.equal(context.token_ids(), cache.token_ids)
    other = path.with_name("other")
    context.save(str(other), model_text(model))
    assert other.read_bytes() == path.read_bytes()
    with pytest.raises(ValueError, match="session must be of the model x, got one of"):
        context.load(str(path), "x")
    for name in ("two\nlines", '"\\u0041\\', "".join(map(chr, range(1, 300)))):
        context.save(str(other), name)
        context.load(str(other), name)
        assert json.loads(contents(other)[1][KEY])["model"] == name


def test_unknown_ids_stay_unknown(llama, ids, path):
    with enable(llama, **H2O):
        cache = new_cache(llama)
        llama(inputs_embeds=llama.get_input_embeddings()(ids), past_key_values=cache)
        cache.save(path)
    assert ChunkedPrefillCache.load(path, llama).token_ids is None


def test_caches_without_a_session(llama, make_ids, path):
    message = "used by an enabled model"
    for cache in (new_cache(llama), ChunkedPrefillCache()):
        with pytest.raises(ValueError, match=message):
            cache.save(path)
    ids = make_ids(2, 40)
    with enable(llama, **SPARSE):
        cache = new_cache(llama)
        llama(ids, past_key_values=cache)
        with pytest.raises(ValueError, match=message):
            pickle.loads(pickle.dumps(cache)).save(path)
        cache.layers[1].crop(-1)
        with pytest.raises(ValueError, match="the same tokens in every layer"):
            cache.save(path)
        cache.reset()
        with pytest.raises(ValueError, match="at least one"):
            cache.save(path)
        assert not path.exists()
        llama(ids, past_key_values=cache)
        cache.save(path)
        os.mkfifo(path.with_name("pipe"))
        with pytest.raises(ValueError, match=r"'.*pipe' must be a regular file"):
            cache.save(path.with_name("pipe"))
        with pytest.raises(ValueError, match="is a folder"):
            cache.save(path.parent)


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
    with pytest.raises(FileNotFoundError, match=r"cannot read .*No such file"):
        ChunkedPrefillCache.load(path.with_name("none"), llama)
    with pytest.raises(ValueError, match="cannot be read: it is a folder"):
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


CHANGES = {
    "weights": lambda model: model.model.norm.weight.mul_(1.5),
    "weights as data": lambda model: model.model.norm.weight.data.mul_(1.5),
    "tokenizer": lambda model: enable(model, **CHARACTERS, tokenizer=LETTERS),
}
CHARACTERS = {**RECALL, "recall_characters": 3}


@pytest.mark.parametrize("what", CHANGES)
def test_a_cache_of_two_states_of_its_model_is_refused(llama, ids, path, what):
    with enable(llama, **(CHARACTERS if what == "tokenizer" else SPARSE)):
        cache, store = new_cache(llama), PrefixCache(1 << 30)
        llama(ids[:, :40], past_key_values=cache)
        store.prefill(llama, ids)
        assert store.prefill(llama, ids)[1] == 64
        CHANGES[what](llama)
        assert store.prefill(llama, ids)[1] == 0
        llama(ids[:, 40:60], past_key_values=cache)
        with pytest.raises(ValueError, match=f"of one state of its model, whose {what.split()[0]}"):
            cache.save(path)
    disable(llama)


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
        cache, store = saved_prompt(model, ids, path), PrefixCache(1 << 30)
        store.prefill(model, longer)

        def is_known():
            return store.prefill(model, longer)[1] == 128

        def check_refused():
            assert not is_known()
            with pytest.raises(ValueError, match=r"of this model: adapters must be .*, got one:"):
                ChunkedPrefillCache.load(path, model)
            with pytest.raises(ValueError, match="whose active adapters, or their weights"):
                cache.save(path)

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
        attention.k_proj.lora_A["one"].weight.data.mul_(2)
        check_refused()
        attention.k_proj.lora_A["one"].weight.data.div_(2)
        assert is_known()
        adapted.base_model.merge_adapter()
        assert not is_known()
        with pytest.raises(ValueError, match=r"of this model: weights must be"):
            ChunkedPrefillCache.load(path, model)


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
        second = path.with_name("second")
        saved_prompt(other, ids, second)
    assert second.read_bytes() == path.read_bytes()


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
    cache.save(path)
    assert cache.settings == settings[1 if sparse else 0]
    with enable(llama, cache.settings):
        loaded = ChunkedPrefillCache.load(path, llama)
        rest = prompt[:, 70 + length :]
        ours, theirs = (in_calls(llama, x, rest, (rest.shape[1],)) for x in (loaded, cache))
        assert torch.equal(ours, theirs)


@pytest.fixture
def whole(llama, ids, path):
    """The bytes of a saved prompt, whose model is enabled."""
    with enable(llama, **RECALL):
        saved_prompt(llama, ids, path)
        yield path.read_bytes()


def refused(path, model, verify=False):
    with pytest.raises(ValueError, match=f"^session '{path}' cannot be (read|used): .+") as caught:
        ChunkedPrefillCache.load(path, model, verify=verify)
    assert "\n" not in str(caught.value)


HEADERS = {
    "version": (3, 1, True, None),
    "dtype": ("float64", "int8", ["float32"]),
    "length": (71, 73, -1, 72.0, 10**30, None),
    "settings": ("chunk_size=-1", "not\none line", "h2o,local_window=4611686018427387904"),
    "model": (5, "another"),
    "more": (1,),
}


@pytest.mark.usefixtures("whole")
def test_a_changed_header_is_refused(llama, path):
    tensors, metadata = contents(path)
    header = json.loads(metadata[KEY])
    texts = [json.dumps({**header, x: value}) for x, values in HEADERS.items() for value in values]
    for text in [*texts, None, "", "[]", "5", "{", "[" * 99999, '{"version":1}', "NaN"]:
        save_file(tensors, path, metadata=None if text is None else {KEY: text})
        refused(path, llama)


def with_value(value, *where):
    def change(tensor):
        tensor[where] = value
        return tensor

    return change


FIRST, LAST, ENDLESS = (0, 0, 0), (0, 0, -1), torch.zeros(0, 1 << 40)
NO_END = [lambda x: ENDLESS]
HEADS = [lambda x: x[:, :1], lambda x: x[0], lambda x: torch.cat([x, x])]
LAYER = [*HEADS, lambda x: x[..., 1:]]
TENSORS = {
    "token_ids": [*NO_END, lambda x: x[:, 1:], lambda x: x.int(), lambda x: x[0]],
    "last_chunk_begin": [*NO_END, lambda x: x[:1], lambda x: x[:0], lambda x: x - 1000],
    "layers.0.key": [*NO_END, *HEADS, lambda x: x.to(torch.float8_e5m2), None],
    "layers.1.value": [*NO_END, *HEADS, lambda x: x[:, :, :9], lambda x: x.half(), None],
    "layers.0.scores": [*LAYER, with_value(torch.nan, *FIRST), with_value(-1, *LAST), None],
    "layers.0.memory": [*LAYER, lambda x: x.flip(2), lambda x: x.long(), None],
    "layers.1.memory": [with_value(72, *LAST), with_value(-2, *LAST)],
    "layers.0.errors": [*LAYER, with_value(torch.inf, *FIRST), lambda x: x.double(), None],
    "layers.1.errors": [
        with_value(value, 0, 1, field)
        for field, values in enumerate(((-1, 0.5, 7, 1e38), (-1e-6,), (-1, 0.5, 1e9), (-1, 1e9)))
        for value in (*values, torch.nan)
    ],
    "layers.2.key": [lambda x: torch.zeros(1)],
    "": [lambda x: torch.zeros(1)],
}


@pytest.mark.usefixtures("whole")
@pytest.mark.parametrize("name", TENSORS)
def test_changed_tensors_are_refused(llama, path, name):
    tensors, metadata = contents(path)
    for change in TENSORS[name]:
        changed = {**tensors, name: torch.zeros(1)}
        if change is None:
            del changed[name]
        else:
            changed[name] = change(tensors.get(name, torch.zeros(1)).clone()).contiguous()
        save_file(changed, path, metadata=metadata)
        refused(path, llama)
