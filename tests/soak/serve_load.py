"""Clients of a server, some of them hostile: nothing is lost."""

import json
import random
import re
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any

import httpx

# How often, of a client; and what comes back.
KINDS = {"answer": 6, "stream": 4, "abort": 3, "leave": 2, "refused": 5}
REFUSED: list[tuple[int, Any]] = [
    (400, b'{"prompt": '),
    (400, b"[" * 5_000),
    (400, {"prompt": "x", "h2o_prefill": {"settings": "best"}}),
    (400, {"prompt": "x", "h2o_prefill": {"settings": "h2o,dense_layers=99"}}),
    (400, {"prompt": [1, 10**6]}),
    (400, {"prompt": "x" * 5000}),
    (404, {"prompt": "x", "model": "another"}),
    (413, b'{"prompt": "' + b"x" * (3 << 20)),
]
SETTINGS = ("h2o,chunk_size=32,local_window=8,heavy_budget=8", "exact", "dense")


class Load:
    """Clients that ask a server of the tiny model of the tests, each one thing after another."""

    def __init__(self, url: str, seed: int) -> None:
        self.url, self.seed = url, seed
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []

    def run(self, clients: int, more: Callable[[int], bool]) -> None:
        """Run until `more`, which gets the number of requests so far, is false."""

        def work(number: int) -> None:
            draw = random.Random(f"{self.seed} {number}")
            with httpx.Client(base_url=self.url, timeout=120) as client:
                while more(self.done.total()):
                    kind = draw.choices(list(KINDS), list(KINDS.values()))[0]
                    self.done[kind] += 1
                    try:
                        self._ask(client, kind, draw)
                    except Exception as error:
                        self.wrong.append(f"{kind}: {type(error).__name__}: {error}")

        threads = [threading.Thread(target=work, args=(number,)) for number in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _ask(self, client: httpx.Client, kind: str, draw: random.Random) -> None:
        if kind == "refused":
            status, body = draw.choice(REFUSED)
            content = body if isinstance(body, bytes) else json.dumps(body).encode()
            header = {"Content-Type": "application/json"}
            found = client.post("/v1/completions", content=content, headers=header)
            assert found.status_code == status and found.json()["error"]["message"], found.text
            return
        tokens = draw.randint(1, 24)
        # Prompts that begin alike, so that some go on from others.
        prompt = [draw.randrange(4) + 1] * draw.choice((40, 80)) + [9] * draw.randint(1, 200)
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": draw.choice((0, 1))}
        body["h2o_prefill"] = {"settings": draw.choice(SETTINGS)}
        if kind == "leave":
            try:
                client.post("/v1/completions", json=body, timeout=draw.uniform(0.001, 0.1))
            except httpx.TimeoutException:
                return
        elif kind == "answer":
            found = client.post("/v1/completions", json=body)
            usage = found.json()["usage"]
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt), tokens)
        else:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
            with client.stream("POST", "/v1/completions", json=body) as found:
                lines = found.iter_lines()
                if kind == "abort":
                    next(lines)
                    return
                *_, usage, _, end, _ = lines
            assert end == "data: [DONE]"
            assert json.loads(usage[6:])["usage"]["completion_tokens"] == tokens


def read_metrics(url: str) -> dict[str, float]:
    """Return the numbers of a server by name."""
    text = httpx.get(f"{url}/metrics").text
    found = re.findall(r"^h2o_prefill_(\S+) (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in found}
