"""The thread that runs the model: one request at a time, the others wait in a bounded queue."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from h2o_prefill.config import PrefillConfig
from h2o_prefill.eval.runs import end_tokens, generate_greedily
from h2o_prefill.eval.timing.generation import Sampling
from h2o_prefill.hf import PrefixCache, disable, enable
from h2o_prefill.hf.cache import cache_argument
from h2o_prefill.hf.report import attention_layers
from h2o_prefill.serving.metrics import Metrics
from h2o_prefill.serving.protocol import ApiError, Finish

_log = logging.getLogger(__name__)


class _CancelledError(Exception):
    """Ends a generation whose answer nobody waits for."""


class Job:
    """One prompt, the token ids of which are known, on its way through the worker.

    `events` gets the pieces of its text and then a `Finish`, or at any time an `ApiError`.
    """

    def __init__(
        self,
        ids: list[int],
        max_tokens: int,
        sampling: Sampling | None,
        stops: Sequence[str],
        config: PrefillConfig | None,
    ) -> None:
        self.ids, self.max_tokens, self.stops = ids, max_tokens, stops
        self.sampling, self.config = sampling, config
        self.events: asyncio.Queue[str | Finish | ApiError] = asyncio.Queue()
        self.cancelled = False
        self.future: Future[None] | None = None
        self.loop: asyncio.AbstractEventLoop  # of those who submit it, and read its events

    def tell(self, event: str | Finish | ApiError) -> None:
        """Pass on an event, from any thread."""
        self.loop.call_soon_threadsafe(self.events.put_nowait, event)

    def cancel(self) -> None:
        """Take the job out of the queue, or end it at its next layer."""
        self.cancelled = True
        if self.future is not None:
            self.future.cancel()


class Worker:
    """A model and the jobs for it.

    Parameters
    ----------
    model, tokenizer
        A causal language model of transformers that is not enabled, and its tokenizer.
    config : PrefillConfig, optional
        Settings of jobs that name none; None is the model's own attention.
    context : int, optional
        Most tokens of a prompt and its answer, at most what the model takes, which is the default.
    queue : int
        Jobs that may wait.
    prefix_bytes : int
        Most bytes of the prompts and answers that are kept for prompts that begin with them.

    Raises
    ------
    ValueError
        If the settings do not fit the model.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        config: PrefillConfig | None,
        *,
        context: int | None = None,
        queue: int = 16,
        prefix_bytes: int = 1 << 30,
    ) -> None:
        self.model, self.tokenizer, self.config = model, tokenizer, config
        longest = getattr(model.config, "max_position_embeddings", None)
        self.context = min(x for x in (context, longest, 1 << 31) if x is not None)
        self.vocabulary = model.get_input_embeddings().weight.shape[0]
        self.metrics = Metrics()
        self.stopping = False
        self._queue = queue
        self._prefixes = PrefixCache(prefix_bytes)
        self._enabled: PrefillConfig | None = None
        self._enable(config)
        self._jobs: set[Job] = set()
        self._running: Job | None = None
        self._pool = ThreadPoolExecutor(1, "model")
        layers = attention_layers(model, None)
        self._hooks = [layer.register_forward_pre_hook(self._check) for layer in layers]

    def check_open(self) -> None:
        """Raise ApiError if no job can be taken: 503 at the end of the server, 429 if many wait."""
        if self.stopping:
            raise ApiError(503, "the server is stopping", headers={"Connection": "close"})
        if len(self._jobs) > self._queue:
            raise ApiError(
                429,
                f"{self._queue} requests are waiting already: try again later",
                "queue_full",
                headers={"Retry-After": "1"},
            )

    def submit(self, job: Job) -> None:
        """Put a job into the queue, in the thread of an event loop; raises as `check_open`."""
        self.check_open()
        self._jobs.add(job)
        job.loop = asyncio.get_running_loop()
        job.future = self._pool.submit(self._run, job)
        job.future.add_done_callback(lambda _: self._jobs.discard(job))

    def gauges(self) -> dict[str, int]:
        """Return what the metrics have besides counters."""
        running = int(self._running is not None)
        return {
            "running": running,
            "queued": max(len(self._jobs) - running, 0),
            "prefix_cache_bytes": self._prefixes.nbytes,
        }

    def stop(self) -> None:
        """Refuse new jobs, and those that wait; the running one goes on."""
        self.stopping = True
        for job in list(self._jobs):
            if job.future is not None and job.future.cancel():
                job.tell(ApiError(503, "the server is stopping"))

    def cut(self) -> None:
        """Cancel the running job as well."""
        self.stop()
        for job in list(self._jobs):
            job.cancel()

    def close(self) -> None:
        """Cancel all jobs, wait for the thread, and leave the model as it was."""
        self.cut()
        self._pool.shutdown()
        for hook in self._hooks:
            hook.remove()
        self._enable(None)

    def _check(self, *_: object) -> None:
        if self._running is not None and self._running.cancelled:
            raise _CancelledError

    def _enable(self, config: PrefillConfig | None) -> None:
        """Switch the model to these settings; ValueError if they are not for it."""
        if config == self._enabled:
            return
        disable(self.model)
        self._enabled = None
        if config is not None:
            enable(self.model, config, tokenizer=self.tokenizer)
            self._enabled = config

    def _run(self, job: Job) -> None:
        self._running = job
        event: Finish | ApiError
        try:
            try:
                self._enable(job.config)
            except ValueError as error:
                param = "h2o_prefill.settings"
                raise ApiError(400, str(error), "invalid_settings", param) from None
            event = self._generate(job)
        except ApiError as error:
            event = error.with_traceback(None)
        except _CancelledError:
            self.metrics.add("cancelled_total")
            stopping = ApiError(503, "the server is stopping")
            event = stopping if self.stopping else ApiError(499, "the client left")
        except Exception as error:
            _log.exception("a request failed")
            event = ApiError(500, f"internal error: {type(error).__name__}")
        finally:
            self._running = None
        job.tell(event)

    def _generate(self, job: Job) -> Finish:
        ids = torch.tensor([job.ids])
        options: dict[str, Any] = {}
        cache = None
        if job.config is not None:
            cache = self._prefixes.find(self.model, ids)
            options = cache_argument(self.model, cache)
        cached = 0 if cache is None else int(cache.get_seq_length())
        if job.sampling is not None:
            torch.manual_seed(job.sampling.seed)
            options |= job.sampling.options()
        text = _Text(job, self.tokenizer)
        begin = time.perf_counter()
        first = begin

        def add(token_ids: Tensor, *_: Any, **__: Any) -> Tensor:
            nonlocal first
            if text.tokens == 0:
                first = time.perf_counter()
                self.metrics.add("prompt_tokens_total", len(job.ids))
                self.metrics.add("reused_tokens_total", cached)
                self.metrics.add("prefill_seconds_total", first - begin)
                # The next turn may spell the answer in other tokens, or leave it out.
                self._keep(cache)
            self.metrics.add("generated_tokens_total")
            return torch.tensor([text.add(int(token_ids[0, -1]))], device=token_ids.device)

        # In a list, for generate: called with all ids [1, T] after each new token.
        ended: Any = generate_greedily(
            self.model, ids, job.max_tokens, stopping_criteria=[add], **options
        )
        text.end()
        self.metrics.add("decode_seconds_total", time.perf_counter() - first)
        self._keep(cache)
        whole = text.stopped or text.tokens < job.max_tokens
        whole = whole or int(ended[0, -1]) in end_tokens(self.model)
        return Finish("stop" if whole else "length", len(job.ids), cached, text.tokens)

    def _keep(self, cache: Any) -> None:
        if cache is not None and self._prefixes.max_bytes:
            self._prefixes.add(cache)


class _Text:
    """The text of an answer, which is told as soon as it is certain."""

    def __init__(self, job: Job, tokenizer: Any) -> None:
        self.tokens = 0
        self.stopped = False  # by a stop sequence
        self._job, self._tokenizer = job, tokenizer
        # Tokens from those on that the next ones are decoded with, and the number of told ones.
        self._ids: list[int] = []
        self._told = 0
        self._held = ""  # may be the beginning of a stop sequence

    def add(self, token: int) -> bool:
        """Take a token; return whether the answer ends before it."""
        self.tokens += 1
        self._ids.append(token)
        if not self.stopped:
            self._tell(self._new_text(whole=False))
        return self.stopped

    def end(self) -> None:
        """Tell what is held back."""
        if not self.stopped:
            self._tell(self._new_text(whole=True))
            if self._held and not self.stopped:
                self._job.tell(self._held)

    def _new_text(self, whole: bool) -> str:
        """Return the text after the told tokens, "" within a character unless it is the whole."""
        before, after = self._decode(self._ids[: self._told]), self._decode(self._ids)
        if after.endswith("\ufffd") and not whole:
            return ""
        self._ids, self._told = self._ids[self._told :], len(self._ids) - self._told
        return after[len(before) :]

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True))

    def _tell(self, new: str) -> None:
        """Tell a text up to a stop sequence, and but for what may become one."""
        text = self._held + new
        found = [place for stop in self._job.stops if (place := text.find(stop)) >= 0]
        self.stopped = bool(found)
        # Ends of the text with which a stop sequence begins.
        begun = [0, *(n for s in self._job.stops for n in range(1, len(s)) if text.endswith(s[:n]))]
        cut = min(found) if found else len(text) - max(begun)
        told, self._held = text[:cut], text[cut:]
        if told:
            self._job.tell(told)
