"""Other programs with a model in their own formats, each in an environment of its own.

A class is a mode of a program, made and called in a `Worker`: `prefill` takes token ids and
computes the first token; `nll` takes prompts, and rows [begin, end) whose next token is scored, and
returns its -log p in nats, float32 [prompts, rows]; `start` takes a prompt and a number of tokens,
which each call of `decode` decodes greedily. Programs are imported where they are needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

Ids = list[int]

# More than a benchmark decodes.
_ENDLESS = 1 << 16


class OpenvinoPaged:
    """OpenVINO GenAI with paged attention, dense or with a sparse mode."""

    def __init__(self, folder: str, threads: int, float32: bool, batch: int, **sparse: Any) -> None:
        """Take `batch` tokens at a time; `sparse` are fields of `SparseAttentionConfig`."""
        import openvino_genai as genai

        scheduler = genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = batch
        # The same prompt comes again and again: a cached prefix would be no prefill.
        scheduler.enable_prefix_caching = False
        if sparse:
            mode = getattr(genai.SparseAttentionMode, sparse.pop("mode"))
            scheduler.use_sparse_attention = True
            scheduler.sparse_attention_config = genai.SparseAttentionConfig(mode=mode, **sparse)
        self._pipeline = genai.ContinuousBatchingPipeline(
            folder, scheduler, "CPU", _properties(threads, float32)
        )
        # A handle that is let go of drops its request.
        self._decoding: Any = None
        self._steps = 0

    def prefill(self, prompt: Ids) -> None:
        """Compute the first token after a prompt."""
        self._run(prompt, max_new_tokens=1)

    def nll(self, prompts: Sequence[Ids], begin: int, end: int) -> np.ndarray:
        """Score the prompts' own tokens; the first has no probability."""
        outputs = [self._run(ids, max_new_tokens=0, echo=True, logprobs=1) for ids in prompts]
        log_p = np.array([output.generated_log_probs for output in outputs], dtype=np.float32)
        return -log_p[:, begin + 1 : end + 1]

    def start(self, prompt: Ids, steps: int) -> None:
        """Begin a request without an end, whose history grows with each call of `decode`."""
        self._steps = steps
        self._decoding = self._add(prompt, max_new_tokens=_ENDLESS)
        while not self._decoding.can_read():
            self._pipeline.step()

    def decode(self) -> None:
        """Decode the next tokens."""
        for _ in range(self._steps):
            self._pipeline.step()

    def _run(self, prompt: Ids, **options: Any) -> Any:
        handle = self._add(prompt, **options)
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        return handle.read_all()[0]

    def _add(self, prompt: Ids, **options: Any) -> Any:
        import openvino

        ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
        return self._pipeline.add_request(0, ids, _generation_config(**options))


class OpenvinoSdpa:
    """OpenVINO GenAI without paged attention, which tells no probabilities of a prompt."""

    def __init__(self, folder: str, threads: int, float32: bool) -> None:
        import openvino_genai as genai

        properties = _properties(threads, float32) | {"ATTENTION_BACKEND": "SDPA"}
        self._pipeline = genai.LLMPipeline(folder, "CPU", **properties)

    def prefill(self, prompt: Ids) -> None:
        """Compute the first token after a prompt."""
        import openvino
        import openvino_genai as genai

        ids = np.array([prompt], dtype=np.int64)
        tensors = (openvino.Tensor(each) for each in (ids, np.ones_like(ids)))
        self._pipeline.generate(
            genai.TokenizedInputs(*tensors), _generation_config(max_new_tokens=1)
        )


def _properties(threads: int, float32: bool) -> dict[str, Any]:
    properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads}
    if float32:  # not what is fastest on this CPU
        properties["INFERENCE_PRECISION_HINT"] = "f32"
    return properties


def _generation_config(**fields: Any) -> Any:
    import openvino_genai as genai

    config = genai.GenerationConfig()
    for name, value in {"ignore_eos": True, **fields}.items():
        setattr(config, name, value)
    return config


class LlamaCpp:
    """llama.cpp, whose prefill is dense."""

    def __init__(self, file: str, threads: int, longest: int, flash: bool, batch: int) -> None:
        import llama_cpp

        def load(**options: Any) -> Any:
            return llama_cpp.Llama(
                file,
                n_ctx=longest,
                n_batch=max(2048, batch),
                n_ubatch=batch,
                n_threads=threads,
                n_threads_batch=threads,
                flash_attn=flash,
                verbose=False,
                **options,
            )

        self._load = load
        self._model: Any = None
        self._tokens, self._next, self._steps = 0, 0, 0

    def prefill(self, prompt: Ids) -> None:
        """Compute the first token after a prompt."""
        self._model = self._model or self._load()
        self._model.reset()
        self._model.eval(prompt)
        self._next = self._model.sample(temp=0.0)

    def nll(self, prompts: Sequence[Ids], begin: int, end: int) -> np.ndarray:
        """Score prompts by a model that keeps the logits of all rows."""
        model, scores = self._load(logits_all=True), []
        for prompt in prompts:
            model.reset()
            model.eval(prompt)
            rows = (model.scores[row].astype(np.float64) for row in range(begin, end))
            targets = prompt[begin + 1 : end + 1]
            pairs = zip(rows, targets, strict=True)
            scores.append([np.logaddexp.reduce(row) - row[target] for row, target in pairs])
        return np.array(scores, dtype=np.float32)

    def start(self, prompt: Ids, steps: int) -> None:
        """Prefill the prompt after which so many tokens are decoded."""
        self.prefill(prompt)
        self._tokens, self._steps = len(prompt), steps

    def decode(self) -> None:
        """Decode in place of what the last call decoded."""
        self._model.n_tokens = self._tokens
        token = self._next
        for _ in range(self._steps):
            self._model.eval([token])
            token = self._model.sample(temp=0.0)


class LlamaCppFormats:
    """Writes a GGUF file's model in another format."""

    def write(self, source: str, file: str, kind: str) -> None:
        """Write `source` as `file`, in a format like "BF16" or "Q8_0"."""
        import llama_cpp

        options = llama_cpp.llama_model_quantize_default_params()
        options.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{kind}")
        options.allow_requantize = True
        # All of a 16-bit model, not all but the output layer.
        options.pure = kind == "BF16"
        if llama_cpp.llama_model_quantize(source.encode(), file.encode(), options):
            raise ValueError(f"llama.cpp could not write {file}")


class ExecuTorch:
    """ExecuTorch with XNNPACK, whose prefill is dense and computes the logits of all rows."""

    def __init__(self, file: str, threads: int, batch: int) -> None:
        """Take `batch` tokens at a time."""
        from executorch.extension.llm.custom_ops import custom_ops  # noqa: F401
        from executorch.extension.pybindings import portable_lib as runtime
        from executorch.kernels import quantized  # noqa: F401

        runtime._unsafe_reset_threadpool(threads)
        self._model = runtime._load_for_executorch(file)
        self._batch, self._tokens, self._next, self._steps = batch, 0, 0, 0

    def prefill(self, prompt: Ids) -> None:
        """Compute the first token after a prompt."""
        for begin in range(0, len(prompt), self._batch):
            last = self._forward(prompt[begin : begin + self._batch], begin)[-1]
        self._next = int(last.argmax())

    def nll(self, prompts: Sequence[Ids], begin: int, end: int) -> np.ndarray:
        """Score the prompts' own tokens."""
        scores = np.zeros((len(prompts), end + 1), dtype=np.float32)
        for row, ids in zip(scores, prompts, strict=True):
            for first in range(0, end, self._batch):
                piece = slice(first, min(first + self._batch, end))
                logits = self._forward(ids[piece], first).double()
                targets = logits[range(len(logits)), ids[piece.start + 1 : piece.stop + 1]]
                row[piece] = (logits.logsumexp(1) - targets).numpy()
        return scores[:, begin:end]

    def start(self, prompt: Ids, steps: int) -> None:
        """Prefill the prompt after which so many tokens are decoded."""
        self.prefill(prompt)
        self._tokens, self._steps = len(prompt), steps

    def decode(self) -> None:
        """Decode in place of what the last call decoded."""
        token = self._next
        for step in range(self._steps):
            token = int(self._forward([token], self._tokens + step)[-1].argmax())

    def _forward(self, ids: Ids, begin: int) -> Any:
        import torch

        positions = torch.arange(begin, begin + len(ids))
        return self._model.forward((torch.tensor([ids]), positions))[0][0]


class Vllm:
    """vLLM's CPU build, whose prefill is dense."""

    def __init__(self, folder: str, threads: int, longest: int) -> None:
        import os

        # One process, and memory for the cache of one prompt.
        os.environ |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "VLLM_CPU_OMP_THREADS_BIND": f"0-{threads - 1}",
        }
        from vllm import LLM

        self._model = LLM(
            folder,
            dtype="bfloat16",
            max_model_len=longest,
            max_num_batched_tokens=longest,
            max_num_seqs=1,
            enable_prefix_caching=False,
        )

    def prefill(self, prompt: Ids) -> None:
        """Compute the first token after a prompt."""
        self._run(prompt, max_tokens=1)

    def nll(self, prompts: Sequence[Ids], begin: int, end: int) -> np.ndarray:
        """Score the prompts' own tokens; the first has no probability."""
        scores = []
        for ids in prompts:
            found = self._run(ids, max_tokens=1, prompt_logprobs=0).prompt_logprobs
            scores.append([-found[row][ids[row]].logprob for row in range(begin + 1, end + 1)])
        return np.array(scores, dtype=np.float32)

    def _run(self, prompt: Ids, **options: Any) -> Any:
        from vllm import SamplingParams

        asked = SamplingParams(temperature=0.0, ignore_eos=True, **options)
        (output,) = self._model.generate({"prompt_token_ids": prompt}, asked, use_tqdm=False)
        return output
