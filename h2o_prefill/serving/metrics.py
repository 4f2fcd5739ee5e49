"""Counters of a server, as Prometheus reads them."""

from __future__ import annotations

from collections import Counter

_COUNTERS = {
    "prompt_tokens_total": "Tokens of prompts that were prefilled, reused ones included.",
    "reused_tokens_total": "Tokens of prompts whose keys and values were there already.",
    "generated_tokens_total": "New tokens.",
    "prefill_seconds_total": "Seconds from the start of a request to its first token.",
    "decode_seconds_total": "Seconds from first tokens to last ones.",
    "cancelled_total": "Requests whose client left, or which the end of the server cut.",
}
_GAUGES = {
    "running": "Requests that the model works on.",
    "queued": "Requests that wait for it.",
    "prefix_cache_bytes": "Bytes of keys, values and scores that are kept for later prompts.",
}


class Metrics:
    """Numbers since the start; each is changed by one thread only."""

    def __init__(self) -> None:
        self.values: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()

    def add(self, name: str, amount: float = 1) -> None:
        """Add to a counter."""
        assert name in _COUNTERS
        self.values[name] += amount  # type: ignore[assignment]

    def text(self, gauges: dict[str, int]) -> str:
        """Return everything in Prometheus' text format."""
        lines = []
        for kind, names, values in (
            ("counter", _COUNTERS, self.values),
            ("gauge", _GAUGES, gauges),
        ):
            for name, what in names.items():
                lines += [f"# HELP h2o_prefill_{name} {what}", f"# TYPE h2o_prefill_{name} {kind}"]
                lines.append(f"h2o_prefill_{name} {values[name]}")
        name = "h2o_prefill_requests_total"
        lines += [f"# HELP {name} Answers, by status.", f"# TYPE {name} counter"]
        lines += [f'{name}{{status="{status}"}} {n}' for status, n in self.statuses.items()]
        return "\n".join(lines) + "\n"
