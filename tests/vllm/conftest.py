"""A small Llama with random weights, and engines for it."""

import gc
import itertools

import flash_attention
import pytest
import torch
from engines import SIZES, VOCABULARY, Engine, save
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.v1.attention.backends import flash_attn
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.selector import _cached_get_attn_backend

from h2o_prefill.vllm import register, runner


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    path = save(tmp_path_factory.mktemp("tiny"), LlamaConfig(**SIZES), LlamaForCausalLM)
    pairs = map("".join, itertools.product("abcdefghijklmnop", repeat=2))
    words = models.WordLevel({pair: number for number, pair in enumerate(pairs)})
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words)).save_pretrained(path)
    return path


@pytest.fixture(scope="module", params=["cpu", "cuda"])
def device(request):
    """Return whose backend engines have: that for CUDA has CPU tensors here."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "cuda":
            for name in ("flash_attn_varlen_func", "reshape_and_cache_flash"):
                patch.setattr(flash_attn, name, getattr(flash_attention, name), raising=False)
            version = flash_attention.get_flash_attn_version
            patch.setattr(flash_attn, "get_flash_attn_version", version)
            patch.setattr(runner, "on_cuda", lambda: True)
        register()  # Not after the next line, by vLLM.
        path = f"h2o_prefill.vllm.{request.param}.Backend"
        register_backend(AttentionBackendEnum.CPU_ATTN, path)
        _cached_get_attn_backend.cache_clear()
        runner.rules.cache_clear()
        yield request.param
    runner.rules.cache_clear()


@pytest.fixture(scope="module")
def make_engine(device):
    """Make the engines of a module, one at a time: the last one ends when the next begins."""
    made = []

    def end():
        runner.current = None
        made.clear()
        gc.collect()
        cleanup_dist_env_and_memory()

    def make(*args, **options):
        end()
        made.append(Engine(*args, **options))
        return made[0]

    yield make
    end()


@pytest.fixture
def tokens():
    """Return so many random tokens."""

    def draw(count, seed=0):
        return torch.randint(
            VOCABULARY, (count,), generator=torch.Generator().manual_seed(seed)
        ).tolist()

    return draw
