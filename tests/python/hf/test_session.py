"""Session files: of this model and these settings alone; a damaged file is one line."""

import pytest
import torch
from hf_helpers import (
    EVERYTHING,
    H2O,
    LETTERS,
    PRESET_EXACT,
    RECALL,
    RECOMMENDED,
    SPARSE,
    in_calls,
    new_cache,
)

from h2o_prefill import ChunkedPrefillCache, PrefixCache, enable
from h2o_prefill.session import Session

CHARACTERS = {**RECALL, "recall_characters": 3}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "prompt.session"


@pytest.fixture
def save(ids, path):
    """Return a function that prefills a prompt, saves it and returns its cache."""

    def save(model):
        cache = new_cache(model)
        in_calls(model, cache, ids, (64, 1, 1, 6))
        cache.save(path, model)
        return cache

    return save


def test_caches_without_a_session(llama, make_ids, path):
    cache = new_cache(llama)
    with pytest.raises(ValueError, match="filled by an enabled model"):
        cache.save(path, llama)
    with enable(llama, **SPARSE):
        llama(make_ids(2, 40), past_key_values=cache)
        with pytest.raises(OSError, match="directory"):
            cache.save(path.parent, llama)
        cache.layers[1].crop(-1)
        with pytest.raises(ValueError, match="the same tokens in every layer"):
            cache.save(path, llama)
        cache.crop(-39)
        with pytest.raises(ValueError, match="at least one"):
            cache.save(path, llama)
    assert not path.exists()


def test_other_settings_are_refused(llama, path, save):
    with enable(llama, **RECALL):
        save(llama)
    # Neither of these makes it another model.
    llama.config.pad_token_id, llama.config.use_cache = 5, False
    cache = ChunkedPrefillCache.load(path, llama)
    with enable(llama, cache.settings):
        ChunkedPrefillCache.load(path, llama)
    with enable(llama, **SPARSE), pytest.raises(ValueError, match=r"must have the settings .*got"):
        ChunkedPrefillCache.load(path, llama)


def changed(model, row=3, part="weight", by=1e-6):
    getattr(model.model.layers[1].self_attn.k_proj, part)[row] += by
    return model


def swapped(model):
    rows = model.model.embed_tokens.weight
    rows[[5, 9]] = rows[[9, 5]].clone()
    return model


def quantized(model):
    return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear})


OTHERS = {
    "config": lambda build: build("llama"),
    "config of a field": lambda build: build("qwen2", rms_norm_eps=1e-3),
    "dtype": lambda build: build("qwen2").bfloat16(),
    "weights swapped": lambda build: swapped(build("qwen2")),
    "weights changed": lambda build: changed(build("qwen2")),
    "weights quantized": lambda build: quantized(build("qwen2")),
    "weights of two quantized": lambda build: quantized(changed(build("qwen2"), by=0.1)),
}


@pytest.mark.filterwarnings("ignore:.*torch.ao.quantization is deprecated")
@pytest.mark.parametrize("what", OTHERS)
def test_another_model_is_refused(build, path, save, what):
    model, same = (build("qwen2") for _ in range(2))
    if "two" in what:
        model, same = quantized(model), quantized(same)
    with enable(model, **RECALL):
        save(model)
    ChunkedPrefillCache.load(path, same)
    with pytest.raises(ValueError, match=f"{what.split()[0]}[^\n]* got [^\n]*$"):
        ChunkedPrefillCache.load(path, OTHERS[what](build))


def test_the_text_of_the_tokens_is_a_part_of_the_file(llama, path, save):
    with enable(llama, **CHARACTERS, tokenizer=LETTERS):
        cache = save(llama)
        ChunkedPrefillCache.load(path, llama)
    ChunkedPrefillCache.load(path, llama)
    with enable(llama, cache.settings), pytest.raises(ValueError, match="tokenizer must be none"):
        ChunkedPrefillCache.load(path, llama)


@pytest.mark.parametrize("inner", [False, True])
def test_active_adapters_are_a_part_of_a_cache(llama, ids, path, save, inner):
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["q_proj", "k_proj"], init_lora_weights=False, r=2)
    adapted = peft.get_peft_model(llama, config, "one")
    adapted.add_adapter("two", config)
    adapted.eval()
    model, store = adapted.base_model.model if inner else adapted, PrefixCache(1 << 30)
    with enable(model, **SPARSE):
        save(model)
        store.prefill(model, ids)

        def is_known():
            return store.prefill(model, ids)[1] == 64

        def check_refused(message="adapters must be .*, got one:"):
            assert not is_known()
            with pytest.raises(ValueError, match=f"of this model: {message}"):
                ChunkedPrefillCache.load(path, model)

        assert is_known()
        adapted.set_adapter("two")
        check_refused()
        adapted.set_adapter("one")
        assert is_known()
        with adapted.disable_adapter():
            check_refused()
        assert ChunkedPrefillCache.load(path, model).get_seq_length() == 72
        adapter = adapted.base_model.model.model.layers[0].self_attn.k_proj.lora_A["one"]
        adapter.weight.mul_(2)
        check_refused()
        adapter.weight.div_(2)
        adapted.base_model.merge_adapter()
        check_refused("weights must be")


def test_an_offloaded_model_has_no_session(build, llama, path, save):
    accelerate = pytest.importorskip("accelerate")
    with enable(llama, **RECALL):
        save(llama)
    other = accelerate.cpu_offload(build("llama"), execution_device="cpu")
    with (
        enable(other, **RECALL),
        pytest.raises(ValueError, match=r"its weights in memory, '.*' is"),
    ):
        ChunkedPrefillCache.load(path, other)


VARIANTS = (
    H2O,
    PRESET_EXACT,
    RECOMMENDED,
    EVERYTHING,
    {**SPARSE, "chunk_size": 32, "local_window": 8},
    {**SPARSE, "local_window": 2, "heavy_budget": 2},
    {**SPARSE, "min_prefill": 200},
)


@pytest.mark.parametrize("length", [1, 48])
@pytest.mark.parametrize("number", range(len(VARIANTS)))
def test_a_prompt_of_two_settings_has_those_that_built_its_state(
    llama, prompt, path, number, length
):
    first, second = VARIANTS[number - 1], VARIANTS[number]
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
        ours, theirs = (llama(rest, past_key_values=x).logits for x in (loaded, cache))
        assert torch.equal(ours, theirs)


CHANGES = {
    "settings": "not\none line",
    "fingerprint": "another",
    "token_ids": torch.zeros(1, 71, dtype=torch.long),
    "layers": [torch.classes.h2o_prefill.LayerState(False)] * 2,
}


def test_what_is_no_session_is_one_line(llama, path, save):
    with enable(llama, **RECALL):
        save(llama)
    whole, wrong = path.read_bytes(), [b"text"]  # core/test_session.py has other damage
    for name, value in CHANGES.items():
        Session.load(path)._replace(**{name: value}).save(path)
        wrong.append(path.read_bytes())
        path.write_bytes(whole)
    for content in wrong:
        path.write_bytes(content)
        with pytest.raises(ValueError, match=f"^session '{path}' cannot be (read|used): [^\n]+$"):
            ChunkedPrefillCache.load(path, llama)
