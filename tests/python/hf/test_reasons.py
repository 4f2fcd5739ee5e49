"""Why calls are dense: a table of reasons and of what triggers them; dense is what stock gives."""

import sys
import warnings

import pytest
import torch
import transformers
from hf_helpers import (
    EXACT,
    SPARSE,
    assert_close,
    in_calls,
    new_cache,
    sparse_rows,
)
from transformers import AttentionInterface, StaticCache
from transformers.masking_utils import create_causal_mask

from h2o_prefill import PrefillConfig, enable, explain
from h2o_prefill.hf import NAME

PACKED = {"position_ids": torch.cat([torch.arange(30), torch.arange(42)])[None], "use_cache": False}
PACKING, BOUNDS = ("cu_seq_lens_q", "cu_seq_lens_k"), torch.tensor([0, 30, 72], dtype=torch.int32)


def a_4d_mask(model, ids, patch):
    mask = torch.zeros(1, 1, 72, 72).masked_fill(torch.ones(72, 72).triu(1).bool(), -1e30)
    mask[..., 30:, 3:9] = -1e30
    return {"attention_mask": mask}


def the_width_of_an_encoder(model, ids, patch):
    """As a decoder of T5Gemma: its forward gets the encoder's ids."""
    model.config.cross_attention_hidden_size = 8


def its_own_masks(model, ids, patch):
    home = sys.modules[type(model.model).__module__]
    patch.setattr(home, "create_causal_mask", lambda **_: None)


def a_full_cache(tokens):
    """Filled before the model was enabled."""

    def fill(model, ids, patch):
        cache = model(ids[:, :tokens]).past_key_values
        return {"input_ids": ids[:, tokens:], "past_key_values": cache}

    return fill


def a_full_static_cache(model, ids, patch):
    cache = StaticCache(config=model.config, max_cache_len=96)
    model(ids[:, :20], past_key_values=cache)
    return {"input_ids": ids[:, 20:], "past_key_values": cache}


def an_image(model, ids, patch):
    ids = ids % 50 + 3
    ids[0, 10:16] = torch.tensor([BEGIN, IMAGE, IMAGE, IMAGE, IMAGE, END])
    pixels = torch.randn(1, 3, 16, 16, generator=torch.Generator().manual_seed(5))
    types = (ids == IMAGE).long()
    return {"input_ids": ids, "pixel_values": pixels, "token_type_ids": types}


def no_index(model, ids, patch):
    for layer in model.model.layers:
        layer.self_attn.layer_idx = None
    return {"use_cache": False}


def shared_keys(model, ids, patch):
    for layer in model.model.layers:
        layer.self_attn.is_kv_shared_layer = True


HISTORY = "not filled by this model"
# Family; what is changed, and the inputs; a part of the reason.
REASONS = [
    ("llama", a_4d_mask, "not plain causal"),
    ("llama", lambda *_: PACKED, "not plain causal"),
    ("llama", lambda *_: dict.fromkeys(PACKING, BOUNDS), "packed sequences"),
    ("llama", the_width_of_an_encoder, "encoder-decoders"),
    ("llama", its_own_masks, "or of the model"),
    ("llama", lambda model, *_: model.train() and {}, "training mode"),
    ("llama", lambda *_: torch.set_grad_enabled(True) and {}, "gradients"),
    ("llama", lambda *_: {"output_attentions": True}, "output_attentions"),
    # Windows, whose mask the model's own function then gets.
    ("gemma3", lambda model, *_: model.train() and {}, "training mode"),
    ("gemma3", lambda *_: torch.set_grad_enabled(True) and {}, "gradients"),
    ("gemma3", lambda *_: {"output_attentions": True}, "output_attentions"),
    ("llama", no_index, "have no number"),
    ("llama", shared_keys, "layers share"),
    # The silent mistake to fear: no mask, and sdpa takes the first keys instead of all of them.
    *((name, a_full_cache(n), HISTORY) for name in ("llama", "gemma3", "llama4") for n in (20, 1)),
    ("llama", a_full_static_cache, "not filled by this model"),
    ("mistral-window", lambda *_: {}, "that the prompt does not fit into"),
    ("vision", an_image, "not plain causal"),
]


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize(("name", "change", "reason"), REASONS)
def test_calls_that_are_dense_and_said(
    build, ids, vision_model, monkeypatch, implementation, name, change, reason
):
    model = vision_model if name == "vision" else build(name, implementation)
    settings = {**SPARSE, "chunk_size": 24} if reason == HISTORY else SPARSE
    stock, ours, refused = (
        {"input_ids": ids, **(change(model, ids, monkeypatch) or {})} for _ in range(3)
    )
    expected = model(**stock).logits
    with enable(model, **settings), pytest.warns(UserWarning, match=reason) as caught:
        assert_close(model(**ours).logits, expected)
        assert sum(sparse_rows(model)) == 0
    ours = [warning for warning in caught if "h2o_prefill: " in str(warning.message)]
    assert {warning.filename for warning in ours} == {__file__}
    with (
        enable(model, strict=True, **settings),
        pytest.raises(NotImplementedError, match=reason),
    ):
        model(**refused)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"dropout": 0.1}, "dropout"),
        ({"position_bias": torch.zeros(1, 4, 72, 72)}, "position_bias"),
        ({"cache": object()}, "keeps no state"),
    ],
)
def test_arguments_that_make_a_call_dense(llama, ids, monkeypatch, arguments, reason):
    with enable(llama, **SPARSE):
        functions = AttentionInterface._global_mapping
        attend = functions[NAME]
        with_arguments = lambda *args, **kwargs: attend(*args, **{**kwargs, **arguments})  # noqa: E731
        monkeypatch.setitem(functions, NAME, with_arguments)
        with pytest.warns(UserWarning, match=reason):
            llama(ids)
        assert sum(sparse_rows(llama)) == 0


@pytest.mark.parametrize("length", [1, 15, 16])
def test_up_to_one_chunk_is_dense(llama, make_ids, length):
    ids = make_ids(1, length)
    stock = llama(ids).logits
    with enable(llama, **SPARSE):
        assert_close(llama(ids, use_cache=False).logits, stock)
        assert sum(sparse_rows(llama)) == 0
        assert_close(llama(ids).logits, stock)
        # With a cache, which goes on, the scores of a whole chunk are needed.
        assert sparse_rows(llama) == [16 * (length == 16)] * 2


@pytest.mark.parametrize(
    ("settings", "layers"),
    [
        ({"min_prefill": 73}, []),
        ({"min_prefill": 72}, [0, 1]),
        ({"dense_layers": (0,)}, [1]),
        ({"dense_layers": (0, 1)}, []),
        ({"config": "exact"}, []),
    ],
)
def test_settings_that_make_calls_and_layers_dense(llama, ids, settings, layers):
    stock = llama(ids).logits
    with enable(llama, strict=True, **{**SPARSE, **settings}):
        ours = llama(ids).logits
        assert sparse_rows(llama) == [72 * (layer in layers) for layer in range(2)]
        if settings.get("config") == "exact":
            assert {(x.mode, x.reason) for x in explain(llama)} == {("dense", "exact")}
    if not layers:
        assert_close(ours, stock)


def test_an_empty_memory_set_is_dense(llama, ids):
    with pytest.warns(UserWarning, match="every call is dense"):
        empty = PrefillConfig(chunk_size=16, local_window=0, heavy_budget=0)
    stock = llama(ids).logits
    with pytest.warns(UserWarning, match="the memory set is empty"), enable(llama, empty):
        assert_close(llama(ids).logits, stock)
        assert sum(sparse_rows(llama)) == 0
    with pytest.raises(NotImplementedError, match="the memory set is empty"):
        enable(llama, empty, strict=True)


def test_settings_by_layer_need_numbers(build, ids):
    model = build("Zamba2ForCausalLM")
    stock = model(ids).logits
    with enable(model, dense_layers=(1,), **SPARSE), pytest.warns(match="have no number"):
        assert_close(model(ids).logits, stock, 1e-4)


def test_softcap_with_sdpa_runs_the_eager_function(build, ids):
    stock = build("gemma2", "eager")(ids).logits
    model = build("gemma2")
    # Transformers lets a config name sdpa, which drops the soft cap or refuses it.
    model.config._attn_implementation = "sdpa"
    with enable(model, dense_layers=(1,), **SPARSE):
        assert_close(model(ids).logits, stock)


@pytest.mark.parametrize("kind", ["default", "none", "static", "window"])
def test_autocast(build, ids, kind):
    model = build("gemma3" if kind == "window" else "llama")

    with torch.autocast("cpu", dtype=torch.bfloat16):
        stock = model(ids).logits
        with enable(model, **EXACT):
            if kind == "static":
                cache = StaticCache(config=model.config, max_cache_len=90)
                ours = in_calls(model, cache, ids, (64, 1, 7))
            else:
                ours = model(ids, use_cache=kind != "none").logits
            assert sum(sparse_rows(model)) > 0
    assert ours.dtype == stock.dtype
    torch.testing.assert_close(ours.float(), stock.float(), atol=0.3, rtol=0.1)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("how", ["export", "trace"])
def test_an_exported_or_traced_model_is_dense(llama, ids, how):
    class Logits(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model = llama

        def forward(self, ids):
            return self.model(ids, use_cache=False).logits

    def make():
        if how == "export":
            return torch.export.export(Logits(), (ids,), strict=False).module()
        return torch.jit.trace(Logits(), (ids,), check_trace=False)

    stock = llama(ids).logits
    with enable(llama, **SPARSE), pytest.warns(UserWarning, match="is being exported or traced"):
        program = make()
    assert_close(program(ids), stock)


def assert_as_stock(model, **inputs):
    """Compare the logits of a model with and without us."""
    stock = model(**inputs).logits
    with warnings.catch_warnings(), enable(model, **EXACT):
        warnings.filterwarnings("ignore", message="h2o_prefill: ")
        assert_close(model(**inputs).logits, stock, 2e-5)


@pytest.mark.parametrize(
    ("name", "changes"),
    [("BigBirdPegasus", {"attention_type": "original_full"}), ("PegasusX", {}), ("NllbMoe", {})],
)
@pytest.mark.parametrize("encoded", [72, 50])
def test_a_decoder_that_is_causal_by_its_mask(build, make_ids, name, changes, encoded):
    model = build(f"{name}ForConditionalGeneration", **changes)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="h2o_prefill: ")
        assert_as_stock(model, input_ids=make_ids(1, encoded), decoder_input_ids=make_ids(1, 72, 5))


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("image_keys", [72, 50])
@pytest.mark.parametrize("masked", [True, False])
def test_cross_attention_is_told_by_what_it_is(make_ids, build, implementation, image_keys, masked):
    model = build("MllamaForCausalLM", implementation, cross_attention_layers=[1])
    for name, parameter in model.named_parameters():
        if name.endswith("attn_gate"):
            parameter.fill_(1.0)
    states = torch.randn(1, image_keys, model.config.hidden_size)
    mask = {"cross_attention_mask": torch.zeros(1, 1, 72, image_keys)} if masked else {}
    assert_as_stock(model, input_ids=make_ids(1, 72), cross_attention_states=states, **mask)


def made_before(layer, config, tokens):
    """Return a list that gets a mask for so many tokens, made before each forward of a layer."""
    masks, states = [], torch.zeros(1, tokens, 1)
    arguments = {"inputs_embeds": states, "attention_mask": None, "past_key_values": None}
    layer.register_forward_pre_hook(
        lambda *_: masks.append(create_causal_mask(config, **arguments))
    )
    return masks


def test_masks_of_several_sizes_in_one_forward(build, ids):
    llama = build("llama", "eager")
    made_before(llama.model.layers[1], llama.config, 30)
    assert_as_stock(llama, input_ids=ids)


IMAGE, BEGIN, END = 58, 59, 60


@pytest.fixture
def vision_model(build):
    """Return a tiny Gemma 3 with a vision tower."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "image_size": 16, "patch_size": 4}
    vision = {**sizes, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.Gemma3Config(
        text_config=build("gemma3").config,
        vision_config=vision,
        mm_tokens_per_image=4,
        image_token_index=IMAGE,
        boi_token_index=BEGIN,
        eoi_token_index=END,
    )
    torch.manual_seed(7)
    return transformers.Gemma3ForConditionalGeneration(config).eval()


def test_the_vision_tower_is_left_alone(vision_model, ids):
    config = vision_model.config
    ids, parts = ids % 50 + 3, (config, config.text_config, config.vision_config)
    config.vision_config._attn_implementation = "eager"
    before, stock = [x._attn_implementation for x in parts], vision_model(ids).logits
    cache = new_cache(vision_model)
    with enable(vision_model, **EXACT):
        assert [x._attn_implementation for x in parts] == [before[0], NAME, "eager"]
        assert_close(vision_model(ids, past_key_values=cache).logits, stock)
        assert sum(sparse_rows(vision_model)) == 72 and torch.equal(cache.token_ids, ids)
    assert [x._attn_implementation for x in parts] == before
