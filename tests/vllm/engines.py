"""vLLM in this process, and the sizes of small models."""

import os
import types

# Read by vLLM when it is imported. One process, so that tests see the plugin's state.
CHUNK = 128
SETTINGS = f"h2o,chunk_size={CHUNK},local_window=16,heavy_budget=16,min_prefill=none"
os.environ |= {
    "H2O_PREFILL_SETTINGS": SETTINGS,
    "HF_HUB_OFFLINE": "1",
    "OMP_WAIT_POLICY": "passive",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
if os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "1":
    # Its kernels are Triton's, which the package index has without a CPU backend: interpreted.
    os.environ["TRITON_INTERPRET"] = "1"
    from triton.backends import backends

    driver = types.SimpleNamespace(is_active=lambda: True)
    backends["cpu"] = types.SimpleNamespace(driver=driver)

from dataclasses import dataclass

import torch
from vllm import LLM, SamplingParams

from h2o_prefill.vllm import runner

VOCABULARY = 256
SIZES = {
    **{"vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 256},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "num_hidden_layers": 3},
    **{"bos_token_id": None, "eos_token_id": None, "tie_word_embeddings": False},
    "max_position_embeddings": 4096,
    # Attention that tells tokens apart.
    "initializer_range": 0.12,
}
OPTIONS = {
    **{"dtype": "float32", "max_model_len": 2048, "enforce_eager": True, "max_num_seqs": 8},
    **{"max_num_batched_tokens": 4 * CHUNK + 8, "block_size": 32, "skip_tokenizer_init": True},
}
NAMES = ("sparse_tokens", "exact_tokens", "lost_tokens", "state_hits", "state_misses")


@dataclass
class Answer:
    """Tokens, their log-probabilities, tokens of the prompt found in the cache, and losses."""

    tokens: list
    logprobs: torch.Tensor
    cached: int
    losses: torch.Tensor


class Engine:
    """vLLM with the plugin."""

    def __init__(self, folder, **options):
        self.llm = LLM(str(folder), **{**OPTIONS, **options})

    def ask(self, *prompts, settings=None, new=4, losses=False, salt=None, adapter=None):
        """Answer prompts greedily in one batch; `settings` may be a list, for each of them."""
        each = settings if isinstance(settings, list) else [settings] * len(prompts)
        shared = {"temperature": 0, "max_tokens": new, "ignore_eos": True, "detokenize": False}
        shared |= {"logprobs": 0, "prompt_logprobs": 0 if losses else None}
        extras = [None if x is None else {"h2o_prefill": x} for x in each]
        params = [SamplingParams(**shared, extra_args=extra) for extra in extras]
        asked = [{"prompt_token_ids": x} | ({"cache_salt": salt} if salt else {}) for x in prompts]
        more = {"use_tqdm": False, "lora_request": adapter}
        answers = [_answer(x) for x in self.llm.generate(asked, params, **more)]
        return answers[0] if len(answers) == 1 else answers

    @property
    def planner(self):
        return runner.current.planner

    def counted(self, *prompts, **options):
        """Return what `ask` returns, and by how much the counters changed that did."""
        before = self._counts()
        answers = self.ask(*prompts, **options)
        now = zip(NAMES, self._counts(), before, strict=True)
        changes = {name: int(after - x) for name, after, x in now}
        return answers, {name: x for name, x in changes.items() if x}

    def _counts(self):
        return [self.planner.counters[name] if runner.current else 0 for name in NAMES]

    @property
    def scheduler(self):
        return self.llm.llm_engine.engine_core.engine_core.scheduler

    def forget(self):
        """Empty vLLM's prefix cache, and with it ours."""
        assert self.llm.reset_prefix_cache()
        assert len(self.planner.checkpoints) == self.planner.checkpoints.nbytes == 0


def _answer(output):
    (one,) = output.outputs
    given = zip(one.token_ids, one.logprobs, strict=True)
    prompt = zip(output.prompt_token_ids, output.prompt_logprobs or [], strict=False)
    losses = [-found[token].logprob for token, found in prompt if found]
    logprobs = torch.tensor([found[token].logprob for token, found in given])
    return Answer(list(one.token_ids), logprobs, output.num_cached_tokens, torch.tensor(losses))


def save(folder, config, kind):
    torch.manual_seed(0)
    kind(config).save_pretrained(folder)
    return folder
