"""Tiny random models of every kind of attention that the integration meets."""

import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

transformers = pytest.importorskip("transformers")

from compatibility.tiny_model import build_tiny  # noqa: E402
from op_testing import widened  # noqa: E402

VOCAB = 61
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
    # Large weights: with the usual 0.02 attention is nearly uniform and hides mistakes.
    "initializer_range": 0.2,
}
WINDOW = 24
MIXED = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
MOE = {"num_local_experts": 2, "num_experts_per_tok": 1}
LATENT = {
    "head_dim": None,
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
CHUNKED = {
    "layer_types": ["chunked_attention", "full_attention"],
    "no_rope_layers": [1, 0],
    "attention_chunk_size": WINDOW,
    "intermediate_size_mlp": 48,
}

# name: (model class, what differs from COMMON)
ZOO: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {}),
    "qwen3": ("Qwen3ForCausalLM", {}),
    "gpt2": (
        "GPT2LMHeadModel",
        {"n_positions": 512, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0},
    ),
    "mistral": ("MistralForCausalLM", {"sliding_window": None}),
    "mistral-window": ("MistralForCausalLM", {"sliding_window": WINDOW}),
    "phi3-window": ("Phi3ForCausalLM", {"sliding_window": WINDOW, "head_dim": None}),
    "phi3": ("Phi3ForCausalLM", {"head_dim": None, "partial_rotary_factor": 0.5}),
    "smollm3": ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0]}),
    "granite": ("GraniteForCausalLM", {"attention_multiplier": 0.3}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen2-window": ("Qwen2ForCausalLM", {**MIXED, "use_sliding_window": True}),
    "gemma2": ("Gemma2ForCausalLM", MIXED),
    "gemma3": ("Gemma3ForCausalLM", MIXED),
    "gpt-oss": ("GptOssForCausalLM", {**MIXED, **MOE}),
    "llama4": ("Llama4ForCausalLM", {**CHUNKED, **MOE}),
    "deepseek-v3": ("DeepseekV3ForCausalLM", LATENT),
    "bloom": ("BloomForCausalLM", {}),
}
# The head dims of DeepSeek V2 and V3: keys of 192, values of 128.
WIDE = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
# Weights of queries and keys, after the latents where there are some.
SHARPENED = ("q_proj", "k_proj", "q_b_proj", "kv_b_proj")

Build = Callable[..., Any]


@pytest.fixture(autouse=True)
def inference(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Run every test without gradients; a warning of ours that no test expects is an error."""
    from h2o_prefill.hf.kinds import DEFAULT_STATE

    monkeypatch.setattr(DEFAULT_STATE, "reported", set())
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("error", message="h2o_prefill: ")
        warnings.filterwarnings("ignore", message="the memory set .* is not smaller")
        yield


@pytest.fixture
def build() -> Build:
    """Return a function that builds a model of the zoo, the same weights for the same name.

    Names of classes give tiny models with the class's own config.
    """

    def make(name: str, attn_implementation: str | None = None, **changes: Any) -> Any:
        model_name, differs = ZOO.get(name, (name, {}))
        if not hasattr(transformers, model_name):
            pytest.skip(f"transformers {transformers.__version__} has no {model_name}")
        if name not in ZOO:
            changes = {**WIDE, **changes} if name.startswith("Deepseek") else changes
            model = build_tiny(name, **changes).model
            if attn_implementation:
                model.set_attn_implementation(attn_implementation)
            # Small weights make attention nearly uniform, which hides mistakes.
            for weight_name, weight in model.named_parameters():
                if any(part in weight_name for part in SHARPENED):
                    weight.mul_(4)
            return model
        if name in ("gemma2", "gpt-oss") and attn_implementation == "sdpa":
            pytest.skip("transformers runs these models eagerly")
        values = {**COMMON, **differs, **changes}
        values = {key: value for key, value in values.items() if key != "head_dim" or value}
        kind = getattr(transformers, model_name)
        config = kind.config_class(**values)
        config._attn_implementation = attn_implementation
        torch.manual_seed(7)
        model = kind(config).eval()
        if name == "gpt-oss":  # sinks that take their share
            for layer in model.model.layers:
                layer.self_attn.sinks.copy_(torch.tensor([-2.0, 0.5, 2.0, 4.0]))
        return model

    return make


@pytest.fixture
def llama(build: Build) -> Any:
    """Return the plainest model there is."""
    return build("llama")


@pytest.fixture
def ids() -> torch.Tensor:
    """Return one prompt of 72 tokens: four chunks of 16 and a half."""
    return random_ids(1, 72)


@pytest.fixture
def prompt() -> torch.Tensor:
    """Return a prompt of 150 tokens whose words come again, so that there is some to recall."""
    words = random_ids(12, 3)
    return words[torch.arange(50) * 5 % 12].reshape(1, -1)


@pytest.fixture
def spawn() -> Iterator[Callable[..., threading.Thread]]:
    """Return a function that runs another in a thread; errors come out at the end of the test."""
    threads: list[threading.Thread] = []
    errors: list[BaseException] = []

    def start(function: Callable[[], object]) -> threading.Thread:
        def work() -> None:
            try:
                with torch.no_grad():
                    function()
            except BaseException as error:
                errors.append(error)

        threads.append(threading.Thread(target=work, daemon=True))
        threads[-1].start()
        return threads[-1]

    yield start
    for thread in threads:
        thread.join(20.0)  # seconds, far more than any of these takes
        assert not thread.is_alive()
    assert errors == []


def random_ids(batch: int, length: int, seed: int = 3) -> torch.Tensor:
    """Return int64 [batch, length] without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB, (batch, length), generator=generator)


@pytest.fixture
def make_ids() -> Callable[..., torch.Tensor]:
    """Return `random_ids`."""
    return random_ids


@pytest.fixture
def logits_by_the_oracle(monkeypatch: pytest.MonkeyPatch) -> Callable[..., torch.Tensor]:
    """Return a function that gives the logits of a model whose attention is the oracle."""
    from h2o_prefill.reference import ops as oracle

    given: dict[str, Any] = {}

    def attend(module: Any, q: Any, k: Any, v: Any, *_: Any, scaling: float, **more: Any) -> Any:
        wide = widened((q, k, v))
        logits = {"sinks": more.get("s_aux"), "softcap": more.get("softcap") or 0.0}
        if window := more.get("sliding_window"):
            out, _ = oracle.sliding_window_attention(*wide, window, scaling, **logits)
        else:
            # Layers that share a module have the number -1: errors are not measured in layer 0.
            number = module.layer_idx if module.layer_idx >= 0 else 1
            settings = given["config"].of_layer(number).to_string()
            lists = given["recall"] or [None] * 3
            call = (*wide, None, None, *lists, 0, settings, scaling)
            out, *_ = oracle.chunked_sparse_attention(*call, **logits)
        return out.transpose(1, 2).to(q.dtype), None

    for interface, function in (
        (transformers.AttentionInterface, attend),
        (transformers.AttentionMaskInterface, lambda **_: None),
    ):
        known = dict(interface._global_mapping)
        monkeypatch.setattr(interface, "_global_mapping", {**known, "oracle": function})

    def logits(model: Any, ids: torch.Tensor, config: Any) -> torch.Tensor:
        given["config"] = config
        given["recall"] = (
            oracle.lexical_recall(ids, 0, config.to_string()) if config.recall else None
        )
        before = model.config._attn_implementation
        model.set_attn_implementation("oracle")
        found = model(ids, use_cache=False).logits
        model.set_attn_implementation(before)
        return found

    return logits
