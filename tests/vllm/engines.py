"""vLLM in this process, and the sizes of small models."""

import os

# Read by vLLM when it is imported. One process, so that tests see the plugin's state.
CHUNK = 128
SETTINGS = f"h2o,chunk_size={CHUNK},local_window=16,heavy_budget=16"
os.environ |= {
    "H2O_PREFILL_SETTINGS": SETTINGS,
    "HF_HUB_OFFLINE": "1",
    "OMP_WAIT_POLICY": "passive",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}

from dataclasses import dataclass

import torch
from vllm import LLM, SamplingParams

from h2o_prefill.vllm import runner

VOCABULARY = 256
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 4096,
    # Attention that tells tokens apart.
    "initializer_range": 0.12,
    "bos_token_id": None,
    "eos_token_id": None,
    "tie_word_embeddings": False,
}


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
        defaults = {
            "dtype": "float32",
            "max_model_len": 2048,
            "enforce_eager": True,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 4 * CHUNK + 8,
            "block_size": 32,
            "skip_tokenizer_init": True,
        }
        self.llm = LLM(str(folder), **{**defaults, **options})

    def ask(self, *prompts, settings=None, new=4, losses=False, salt=None, **more):
        """Answer prompts greedily in one batch; `settings` may be a list, for each of them."""
        each = settings if isinstance(settings, list) else [settings] * len(prompts)
        params = [
            SamplingParams(
                temperature=0,
                max_tokens=new,
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
                prompt_logprobs=0 if losses else None,
                extra_args=None if x is None else {"h2o_prefill": x},
                **more,
            )
            for x in each
        ]
        asked = [{"prompt_token_ids": x} | ({"cache_salt": salt} if salt else {}) for x in prompts]
        answers = [_answer(x) for x in self.llm.generate(asked, params, use_tqdm=False)]
        return answers[0] if len(answers) == 1 else answers

    @property
    def planner(self):
        return runner.current.planner

    def counted(self, call):
        """Return the result of a call, and by how much it changed the counters that it changed."""
        names = ["sparse_tokens", "exact_tokens", "lost_tokens", "state_hits", "state_misses"]
        counters = None if runner.current is None else self.planner.counters
        before = {name: counters[name] if counters else 0 for name in names}
        result = call()
        now = {name: self.planner.counters[name] - before[name] for name in names}
        return result, {name: int(x) for name, x in now.items() if x}

    def forget(self):
        """Empty vLLM's prefix cache and ours."""
        assert self.llm.reset_prefix_cache()
        checkpoints, kept = self.planner.checkpoints, self.planner.checkpoints.max_bytes
        checkpoints.settle()
        checkpoints.max_bytes = 0
        checkpoints.settle()
        checkpoints.max_bytes = kept


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
