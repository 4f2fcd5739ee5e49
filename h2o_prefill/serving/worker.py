"""The thread that runs the model: one request at a time, the others wait in a bounded queue."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from h2o_prefill.config import PrefillConfig
from h2o_prefill.generation.generate import Sampling
from h2o_prefill.generation.runs import end_tokens, generate_greedily
from h2o_prefill.hf import PrefixCache, disable, enable
from h2o_prefill.hf.cache import cache_argument
from h2o_prefill.hf.kinds import longest_text
from h2o_prefill.hf.report import attention_layers
from h2o_prefill.serving.protocol import ApiError, Finish

_log = logging.getLogger(__name__)

# Each is changed by one thread only.
_COUNTS = (
    *("prompt_tokens_total", "reused_tokens_total", "prefill_seconds_total"),
    *("generated_tokens_total", "cancelled_total"),
)


class _CancelledError(Exception):
    """Ends a generation whose answer nobody waits for."""


@dataclass(eq=False)
class Job:
    """A prompt as token ids on its way through the worker."""

    ids: list[int]
    max_tokens: int
    sampling: Sampling | None
    stops: list[str]
    config: PrefillConfig | None  # None: the model's own attention
    # Pieces of text and then a `Finish`, or at any time an error.
    events: asyncio.Queue[str | Finish | ApiError] = field(default_factory=asyncio.Queue)
    cancelled: bool = False
    future: Future[None] = field(init=False)
    loop: asyncio.AbstractEventLoop = field(init=False)

    def tell(self, event: str | Finish | ApiError) -> None:
        """Pass on an event, from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop has ended, with all who wait
            self.loop.call_soon_threadsafe(self.events.put_nowait, event)

    def cancel(self) -> None:
        """End the job at its next layer, or before it begins."""
        self.cancelled = True
        self.future.cancel()


class Worker:
    """A model and the jobs for it.

    The model is not enabled; `config` has the settings of jobs that name none, `context` is the
    most tokens of a prompt with its answer, `queue` the most jobs that wait, and `prefix_bytes`
    what is kept for prompts that begin as one before. ValueError if the settings do not fit.
    """

    def __init__(
        self,
        model: Any,
        tokenizer: Any,
        config: PrefillConfig | None,
        context: int | None = None,
        queue: int = 16,
        prefix_bytes: int = 1 << 30,
    ) -> None:
        self.model, self.tokenizer, self.config = model, tokenizer, config
        self.context = min(
            x for x in (context, longest_text(model.config), 1 << 31) if x is not None
        )
        self.stopping = False
        self.counts: Counter[str] = Counter(dict.fromkeys(_COUNTS, 0))
        self._queue, self._prefixes = queue, PrefixCache(prefix_bytes)
        self._enabled: PrefillConfig | None = None
        if refused := self._enable(config):
            raise ValueError(refused.detail)
        self._jobs: set[Job] = set()
        self._running: Job | None = None
        self._pool = ThreadPoolExecutor(1, "model")
        layers = attention_layers(model, None)
        self._hooks = [layer.register_forward_pre_hook(self._check) for layer in layers]

    def check_open(self) -> None:
        """Raise ApiError if no job can be taken: 503 at the end of the server, 429 if many wait."""
        if self.stopping:
            raise ApiError(503, "the server is stopping", {"Connection": "close"})
        if len(self._jobs) > self._queue:
            wait = {"Retry-After": "1"}
            raise ApiError(429, f"{self._queue} requests wait already", wait, code="queue_full")

    def submit(self, job: Job) -> None:
        """Put a job into the queue, in the thread of an event loop; raises as `check_open`."""
        self.check_open()
        self._jobs.add(job)
        job.loop = asyncio.get_running_loop()
        job.future = self._pool.submit(self._run, job)
        job.future.add_done_callback(lambda _: self._jobs.discard(job))

    def numbers(self) -> dict[str, float]:
        """Return what the metrics have."""
        running = int(self._running is not None)
        waiting = max(len(self._jobs) - running, 0)
        kept = self._prefixes.nbytes
        return {**self.counts, "running": running, "queued": waiting, "prefix_cache_bytes": kept}

    def stop(self, cut: bool = False) -> None:
        """Refuse new jobs, and those that wait; `cut` cancels the running one as well."""
        self.stopping = True
        for job in list(self._jobs):
            if cut or job is not self._running:
                job.cancel()
                job.tell(ApiError(503, "the server is stopping"))

    def close(self, seconds: float | None = None) -> bool:
        """Cancel all jobs, leave the model as it was; return False if one goes on for longer."""
        self.stop(cut=True)
        if wait([job.future for job in list(self._jobs)], seconds).not_done:
            return False
        self._pool.shutdown()
        for hook in self._hooks:
            hook.remove()
        self._enable(None)
        return True

    def _check(self, *_: object) -> None:
        if self._running is not None and self._running.cancelled:
            raise _CancelledError

    def _enable(self, config: PrefillConfig | None) -> ApiError | None:
        """Switch the model to these settings; return why they are not for it."""
        if config == self._enabled:
            return None
        disable(self.model)
        self._enabled = None
        try:
            if config is not None:
                enable(self.model, config, tokenizer=self.tokenizer)
        except ValueError as error:
            return settings_error(error)
        self._enabled = config
        return None

    def _run(self, job: Job) -> None:
        self._running = job
        event: Finish | ApiError
        try:
            event = self._enable(job.config) or self._generate(job)
        except _CancelledError:
            self.counts["cancelled_total"] += 1
            event = ApiError(503, "the server is stopping")
        except Exception as error:
            _log.exception("a request failed")
            event = ApiError(500, f"internal error: {type(error).__name__}")
        self._running = None
        # Before the client knows of it, who may ask again at once.
        self._jobs.discard(job)
        job.tell(event)

    def _generate(self, job: Job) -> Finish:
        ids, cached = torch.tensor([job.ids]), 0
        options, begin = {}, time.perf_counter()
        if job.config is not None:
            cache, cached = self._prefixes.prefill(self.model, ids)
            options = cache_argument(self.model, cache)
        if job.sampling is not None:
            torch.manual_seed(job.sampling.seed)
            options |= job.sampling.options()
        text, first = _Text(job, self.tokenizer), 0.0

        def add(token_ids: Tensor, *_: Any, **__: Any) -> Tensor:
            nonlocal first
            if text.tokens == 0:
                first = time.perf_counter()
                self.counts["prompt_tokens_total"] += len(job.ids)
                self.counts["reused_tokens_total"] += cached
                self.counts["prefill_seconds_total"] += first - begin  # type: ignore[assignment]
            self.counts["generated_tokens_total"] += 1
            return torch.tensor([text.add(int(token_ids[0, -1]))], device=token_ids.device)

        # A criterion gets all ids [1, T] after each new token.
        ended: Any = generate_greedily(
            self.model, ids, job.max_tokens, stopping_criteria=[add], **options
        )
        text.end()
        done = text.stopped or int(ended[0, -1]) in end_tokens(self.model)
        usage = {
            "prompt_tokens": len(job.ids),
            "completion_tokens": text.tokens,
            "total_tokens": len(job.ids) + text.tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        return Finish("stop" if done else "length", usage)


class _Text:
    """The text of an answer, which is told as soon as it is certain."""

    def __init__(self, job: Job, tokenizer: Any) -> None:
        self.tokens = 0
        self.stopped = False  # by a stop sequence
        self._job, self._tokenizer = job, tokenizer
        # The last tokens: some that are in the text, as the next ones are decoded after them.
        self._ids: list[int] = []
        self._known = 0
        self._held = ""  # may be the beginning of a stop sequence

    def add(self, token: int) -> bool:
        """Take a token; return whether a stop sequence has ended the answer."""
        self.tokens += 1
        self._ids.append(token)
        new = self._new_text()
        if not new.endswith("\ufffd"):  # within a character
            self._ids, self._known = self._ids[self._known :], len(self._ids) - self._known
            self._tell(new)
        return self.stopped

    def end(self) -> None:
        """Tell what is held back."""
        if not self.stopped:
            self._tell(self._new_text())
        if not self.stopped and self._held:
            self._job.tell(self._held)

    def _new_text(self) -> str:
        known, whole = (
            self._tokenizer.decode(ids, skip_special_tokens=True)
            for ids in (self._ids[: self._known], self._ids)
        )
        return str(whole[len(known) :])

    def _tell(self, new: str) -> None:
        """Tell a text up to a stop sequence, and but for what may become one."""
        text, stops = self._held + new, self._job.stops
        found = [place for stop in stops if (place := text.find(stop)) >= 0]
        begun = [n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])]
        self.stopped = bool(found)
        cut = min(found) if found else len(text) - max(begun, default=0)
        self._held = text[cut:]
        if cut:
            self._job.tell(text[:cut])


def settings_error(error: ValueError) -> ApiError:
    """Return the answer to settings that are none, or not for the model."""
    return ApiError(400, str(error), code="invalid_settings", param="h2o_prefill.settings")
