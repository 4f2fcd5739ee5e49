"""Other programs that prefill the same model from the same GGUF file: optional packages."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from common.backends import Backend
from h2o_prefill.eval.forward import PromptLogits
from h2o_prefill.eval.perplexity.scoring import token_nll

# Tokens that OpenVINO's scheduler takes at a time: its own default, and the best for XAttention.
OPENVINO_BATCHES = [256, 4096]

# More than a benchmark decodes.
_ENDLESS = 1 << 16


def openvino_genai(gguf: Path, threads: int, batches: Sequence[int]) -> dict[str, Backend]:
    """Return OpenVINO GenAI with dense SDPA, and for each batch paged: dense and sparse modes."""
    import openvino_genai as genai

    def sparse(mode: str, **fields: Any) -> Any:
        return genai.SparseAttentionConfig(mode=getattr(genai.SparseAttentionMode, mode), **fields)

    sdpa = "openvino sdpa"
    backends = {sdpa: _openvino_sdpa(sdpa, gguf, threads)}
    for batch in batches:
        modes = {
            "paged": None,
            "tri-shape": sparse("TRISHAPE"),
            "xattention": sparse("XATTENTION"),
            # Of the attention it keeps 80 % by default.
            "xattention 0.95": sparse("XATTENTION", xattention_threshold=0.95),
        }
        dense = f"openvino paged, batch {batch}"
        for name, config in modes.items():
            load = functools.partial(_OpenvinoPaged, gguf, threads, batch, config)
            backends[f"openvino {name}, batch {batch}"] = _openvino_paged(dense, load)
    return backends


def llama_cpp(gguf: Path, threads: int, longest: int) -> dict[str, Backend]:
    """Return llama.cpp, whose prefill is dense."""
    import llama_cpp as package

    sizes = {"n_ctx": longest, "n_batch": 2048, "n_ubatch": 512, "verbose": False}
    counts = {"n_threads": threads, "n_threads_batch": threads}
    load = functools.partial(package.Llama, str(gguf), **sizes, **counts)
    loaded = functools.cache(load)

    def prefill(prompt: Tensor) -> None:
        model = loaded()
        model.reset()
        model.eval(prompt.tolist())

    def nll(prompts: Tensor, rows: range) -> Tensor:
        # Not the model that is timed: logits of all rows cost time, and memory for as long as it is
        # there.
        model = load(logits_all=True)
        scores = []
        for prompt in prompts:
            model.reset()
            model.eval(prompt.tolist())
            logits = PromptLogits(torch.from_numpy(model.scores), None)
            scores.append(token_nll(logits, prompt, rows))
        return torch.stack(scores)

    def decoder(prompt: Tensor, steps: int) -> Callable[[], object]:
        prefill(prompt)
        model = loaded()
        first = model.sample(temp=0.0)

        def decode() -> None:
            # Also takes back what the last call decoded.
            model.n_tokens = len(prompt)
            token = first
            for _ in range(steps):
                model.eval([token])
                token = model.sample(temp=0.0)

        return decode

    return {
        "llama.cpp": Backend("llama.cpp", package.__version__, "llama.cpp", prefill, nll, decoder)
    }


class _OpenvinoPaged:
    """OpenVINO's pipeline with paged attention, dense or with a sparse mode."""

    def __init__(self, gguf: Path, threads: int, batch: int, sparse: Any) -> None:
        import openvino_genai as genai

        scheduler = genai.SchedulerConfig()
        scheduler.max_num_batched_tokens = batch
        # The same prompt comes again and again: a cached prefix would be no prefill.
        scheduler.enable_prefix_caching = False
        if sparse is not None:
            scheduler.use_sparse_attention = True
            scheduler.sparse_attention_config = sparse
        self._pipeline = genai.ContinuousBatchingPipeline(
            str(gguf), scheduler, "CPU", {"INFERENCE_NUM_THREADS": threads}
        )

    def prefill(self, prompt: Tensor) -> None:
        self._run(prompt, max_new_tokens=1)

    def nll(self, prompts: Tensor, rows: range) -> Tensor:
        outputs = [self._run(ids, max_new_tokens=0, echo=True, logprobs=1) for ids in prompts]
        # Of the prompts' own tokens; the first of them has none.
        log_p = torch.tensor([output.generated_log_probs for output in outputs])
        return -log_p[:, rows.start + 1 : rows.stop + 1]

    def decoder(self, prompt: Tensor, steps: int) -> Callable[[], object]:
        """Never prefill again: this request has no end, and its history grows with each call."""
        handle = self._add(prompt, max_new_tokens=_ENDLESS)
        while not handle.can_read():
            self._pipeline.step()

        def decode() -> None:
            for _ in range(steps):
                self._pipeline.step()

        # A handle that is let go of drops its request: this holds it as long as `decode` is there.
        weakref.finalize(decode, _end, self._pipeline, handle)
        return decode

    def _run(self, prompt: Tensor, **options: Any) -> Any:
        handle = self._add(prompt, **options)
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
        return handle.read_all()[0]

    def _add(self, prompt: Tensor, **options: Any) -> Any:
        import openvino

        ids = openvino.Tensor(prompt.unsqueeze(0).numpy())
        return self._pipeline.add_request(0, ids, _generation_config(**options))


def _openvino_paged(dense: str, load: Callable[[], _OpenvinoPaged]) -> Backend:
    import openvino_genai as genai

    timed = functools.cache(load)
    return Backend(
        "openvino",
        genai.__version__,
        dense,
        prefill=lambda prompt: timed().prefill(prompt),
        # Pipelines of their own, which do not outlast this: a pipeline keeps the memory of the
        # logits of a whole batch; and it can prefill nothing else while it decodes.
        nll=lambda prompts, rows: load().nll(prompts, rows),
        decoder=lambda prompt, steps: load().decoder(prompt, steps),
    )


def _end(pipeline: Any, handle: Any) -> None:
    handle.cancel()
    # Gives back its blocks.
    pipeline.step()


def _openvino_sdpa(name: str, gguf: Path, threads: int) -> Backend:
    """Its pipeline without paged attention, which tells no probabilities of the prompt."""
    import openvino
    import openvino_genai as genai

    load = functools.cache(
        lambda: genai.LLMPipeline(
            str(gguf), "CPU", INFERENCE_NUM_THREADS=threads, ATTENTION_BACKEND="SDPA"
        )
    )

    def prefill(prompt: Tensor) -> None:
        ids = prompt.unsqueeze(0)
        tensors = (openvino.Tensor(t.numpy()) for t in (ids, torch.ones_like(ids)))
        load().generate(genai.TokenizedInputs(*tensors), _generation_config(max_new_tokens=1))

    return Backend("openvino", genai.__version__, name, prefill)


def _generation_config(**fields: Any) -> Any:
    import openvino_genai as genai

    config = genai.GenerationConfig()
    for name, value in {"ignore_eos": True, **fields}.items():
        setattr(config, name, value)
    return config
