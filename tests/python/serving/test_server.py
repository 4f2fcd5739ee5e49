"""The server: answers of OpenAI's client, limits, clients that leave, and its end."""

import contextlib
import itertools
import json
import re
import socket
import threading
import time

import pytest
import torch

httpx = pytest.importorskip("httpx")
openai = pytest.importorskip("openai")
pytest.importorskip("uvicorn")
pytest.importorskip("fastapi")
pytest.importorskip("transformers")

from soak.serve_load import Load, read_metrics  # noqa: E402

from h2o_prefill import PrefillConfig, PrefixCache, enable  # noqa: E402
from h2o_prefill.hf.cache import cache_argument  # noqa: E402
from h2o_prefill.serving import app as app_module  # noqa: E402
from h2o_prefill.serving import server as server_module  # noqa: E402
from h2o_prefill.serving.app import create_app  # noqa: E402
from h2o_prefill.serving.worker import Worker  # noqa: E402

H2O = "h2o,chunk_size=32,local_window=8,heavy_budget=8"
TEMPLATE = (
    "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}"
    "{% if messages[-1]['role'] == 'assistant' %}{{ raise_exception('no') }}{% endif %}bot:"
)
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
PROMPT = [7, *range(1, 120), 7, 8]


class Served:
    """A server in a thread, with a model whose forwards wait while `gate` is cleared."""

    def __init__(self, model, tokenizer, max_body=None, **limits):
        self.model, self.tokenizer, self.forwards, self.pause = model, tokenizer, 0, 0.0
        self.gate = threading.Event()
        self.gate.set()
        self.hook = model.register_forward_pre_hook(self._wait)
        self.worker = Worker(model, tokenizer, PrefillConfig.parse(H2O), **limits)
        listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        app = create_app(self.worker, "tiny", max_body)
        self.server = server_module.make_server(app)
        self.thread = threading.Thread(target=self.server.run, args=([listening],))
        self.thread.start()
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="-", max_retries=0)

    def close(self):
        self.gate.set()
        self.server.should_exit = True
        self.thread.join(20)
        assert not self.thread.is_alive()
        self.worker.close()
        self.hook.remove()
        assert self.model.config._attn_implementation == "sdpa"

    def connect(self):
        return socket.create_connection(("127.0.0.1", int(self.url.rpartition(":")[2])))

    def _wait(self, *_):
        self.forwards += 1
        time.sleep(self.pause)
        assert self.gate.wait(30)

    def ask(self, prompt=PROMPT, **options):
        asked = {"model": "tiny", "prompt": prompt, "max_tokens": 12, "temperature": 0}
        return self.client.completions.create(**{**asked, **options})

    def post(self, content, path="completions", **headers):
        headers = {"Content-Type": "application/json", **headers}
        if isinstance(content, dict):
            content = json.dumps(content).encode()
        return httpx.post(f"{self.url}/v1/{path}", content=content, headers=headers, timeout=30)

    def wait_for(self, name, value):
        deadline = time.monotonic() + 20
        while (found := read_metrics(self.url)[name]) != value:
            assert time.monotonic() < deadline, f"{name} is {found}"
            time.sleep(0.01)

    def generate(self, settings):
        """Return what the model itself answers to `PROMPT`, its last chunk in a call of its own."""
        ids = torch.tensor([PROMPT])
        options = {"max_new_tokens": 12, "do_sample": False}
        sparse = contextlib.nullcontext()
        if settings != "dense":
            sparse = enable(self.model, settings, tokenizer=self.tokenizer)
        with sparse:
            if settings != "dense":
                cache, _ = PrefixCache(0).prefill(self.model, ids)
                options |= cache_argument(self.model, cache)
            out = self.model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        return out[0, len(PROMPT) :].tolist()


@pytest.fixture
def serve(tiny):
    started = []

    def start(**limits):
        tokenizer = tiny.make_tokenizer()
        tokenizer.chat_template = TEMPLATE
        started.append(Served(tiny.make_model(), tokenizer, **limits))
        return started[-1]

    yield start
    for served in started:
        served.close()


def test_answers_equal_the_model(serve, tiny):
    served = serve(prefix_bytes=0)
    (model,) = served.client.models.list()
    assert model.id == "tiny" and model == served.client.models.retrieve("tiny")
    with pytest.raises(openai.NotFoundError, match="model 'org/other' is not here, only 'tiny'"):
        served.client.models.retrieve("org/other")
    assert httpx.get(f"{served.url}/health").json() == {"status": "ok"}
    said = {}
    for settings in (H2O, "exact", "dense"):
        extra = {"h2o_prefill": {"settings": settings}}
        found = served.ask(extra_body=extra)
        said[settings] = found.choices[0].text
        assert found.choices[0].finish_reason == "length"
        assert (found.usage.prompt_tokens, found.usage.completion_tokens) == (len(PROMPT), 12)
        *pieces, usage = served.ask(
            extra_body=extra, stream=True, stream_options={"include_usage": True}
        )
        assert "".join(piece.choices[0].text for piece in pieces) == said[settings]
        assert pieces[-1].choices[0].finish_reason == "length"
        assert usage.usage == found.usage
    served.worker.close()
    for settings, text in said.items():
        assert text == served.tokenizer.decode(served.generate(settings))
    assert said[H2O] != said["exact"]


def test_chat_sampling_and_ends(serve, tiny):
    served = serve()
    create = served.client.chat.completions.create
    messages = [
        {"role": "developer", "content": "Be short."},
        {"role": "user", "content": [{"type": "text", "text": tiny.SENTENCE}]},
    ]
    asked = {"model": "tiny", "messages": messages, "max_completion_tokens": 9}
    texts = [create(**asked, seed=seed).choices[0].message.content for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    whole = f"system: Be short.\nuser: {tiny.SENTENCE}\nbot:"
    assert served.ask(whole, max_tokens=9, seed=1, temperature=1).choices[0].text == texts[0]
    *pieces, _ = create(**asked, seed=1, stream=True)
    roles = [piece.choices[0].delta.role for piece in pieces]
    assert roles == ["assistant", *[None] * (len(pieces) - 1)] and len(pieces) > 1
    assert "".join(piece.choices[0].delta.content for piece in pieces) == texts[0]
    # Without a limit an answer fills the context.
    filled = create(model="tiny", messages=messages, seed=1).usage
    assert filled.total_tokens == served.model.config.max_position_embeddings
    text = served.ask().choices[0].text
    for stop in (text[5], text[4:7], ["never", text[3:8], text[2:4]]):
        stopped = served.ask(stop=stop).choices[0]
        ends = [text.find(one) for one in ([stop] if isinstance(stop, str) else stop)]
        assert stopped.text == text[: min(end for end in ends if end >= 0)]
        assert stopped.finish_reason == "stop"
        assert "".join(x.choices[0].text for x in served.ask(stop=stop, stream=True)) == (
            stopped.text
        )
    letter = next(x for x in text if x.isascii())
    served.model.generation_config.eos_token_id = served.tokenizer.encode(letter)[0]
    ended = served.ask()
    at_the_limit = served.ask(max_tokens=ended.usage.completion_tokens)
    for choice in (ended.choices[0], at_the_limit.choices[0]):
        assert choice.finish_reason == "stop" and choice.text == text[: text.index(letter) + 1]


def test_a_second_turn_prefills_only_its_suffix(serve):
    served = serve()
    answer = served.ask().usage
    assert answer.prompt_tokens_details.cached_tokens == 0
    turn = served.ask([*PROMPT, 5, 6]).usage
    assert turn.prompt_tokens_details.cached_tokens == 96
    found = read_metrics(served.url)
    assert found["prompt_tokens_total"] - found["reused_tokens_total"] == 2 * len(PROMPT) + 2 - 96
    assert found["prefill_seconds_total"] > 0
    other = served.ask([*PROMPT, 5], extra_body={"h2o_prefill": {"settings": "exact"}}).usage
    assert other.prompt_tokens_details.cached_tokens == 0


# Fields that ask for nothing, as clients send them.
IDLE = {
    **{"n": 1, "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "tools": []},
    **{"tool_choice": "none", "response_format": {"type": "text"}, "store": False, "metadata": {}},
    **{"top_logprobs": 0, "logprobs": False, "service_tier": "auto", "modalities": ["text"]},
    **{"stream_options": {"include_usage": None}, "h2o_prefill": {"settings": None}, "stop": None},
    **{"functions": None, "reasoning_effort": None, "parallel_tool_calls": True, "user": "me"},
}


def test_fields_that_ask_for_nothing_are_taken(serve):
    served = serve()
    asked = {"max_tokens": 5, "temperature": 0}
    for field, content in (("messages", [{"role": "user", "content": "x"}]), ("prompt", "x")):
        path = "chat/completions" if field == "messages" else "completions"
        plain, idle = (
            served.post({field: content, **asked, **more}, path).json() for more in ({}, IDLE)
        )
        assert plain["choices"] == idle["choices"]
    asked = {**asked, "max_tokens": 12}
    for prompt in (PROMPT, [PROMPT], (text := served.tokenizer.decode(PROMPT)), [text]):
        usage = served.post({"prompt": prompt, **asked}).json()["usage"]
        assert usage["completion_tokens"] == 12


def test_clients_hand_back_what_they_got(serve):
    langchain = pytest.importorskip("langchain_openai")
    served = serve()
    say = [{"role": "user", "content": "Name a colour."}]
    asked = {"model": "tiny", "temperature": 0, "max_tokens": 8}
    text = served.client.chat.completions.create(messages=say, **asked).choices[0].message.content
    # The client wants answers that end before their limit.
    stop = text[-1]
    expected = text[: text.index(stop)]
    with served.client.chat.completions.stream(messages=say, stop=stop, **asked) as events:
        first = events.get_final_completion().choices[0].message
    empty = {"role": "assistant", "content": None, "tool_calls": [], "annotations": []}
    assert first.content == expected and first.role == "assistant"
    more = {"role": "user", "content": "Another?"}
    for said in (first.model_dump(), first, {"role": "assistant", "content": expected}, empty):
        turn = [*say, said, more]
        with served.client.chat.completions.stream(messages=turn, stop="x" * 9, **asked) as events:
            assert any(event.type == "content.delta" for event in events)
    options = {"base_url": f"{served.url}/v1", "api_key": "-", "max_retries": 0, **asked}
    chat = langchain.ChatOpenAI(**options)
    answer = chat.invoke("Name a colour.")
    assert answer.content == text
    turn = [("human", "Name a colour."), answer, ("human", "Another?")]
    assert "".join(piece.content for piece in chat.stream(turn)) == chat.invoke(turn).content
    model = langchain.OpenAI(**options)
    assert (
        "".join(model.stream("x"))
        == model.invoke("x")
        == served.ask("x", max_tokens=8).choices[0].text
    )


X = {"prompt": "x"}
WRONG = [
    (400, "n must be 1", {**X, "n": 2}),
    (400, "n must be 1", {**X, "n": True}),
    (400, "token ids >= 0 and < 257", {"prompt": [1, 257]}),
    (400, "token ids >= 0 and < 257", {"prompt": [-1]}),
    (400, "prompt must not be empty", {"prompt": []}),
    (400, "prompt must be one text, or its token ids, got a list of 2", {"prompt": ["a", "b"]}),
    (400, "body: Invalid JSON", {"prompt": "\ud800"}),
    (400, "body: Invalid JSON", {"messages": [{"role": "user", "content": "\ud800"}]}),
    (400, "content of role 'user' must not be null", {"messages": [{"role": "user"}]}),
    (400, "500 tokens and 16 new ones must be <= 512", {"prompt": "x" * 500}),
    (400, "temperature: ", {**X, "temperature": float("nan")}),
    (400, "nonsense: Extra inputs", {**X, "nonsense": []}),
    (400, r"tools must be \[\]", {**X, "tools": [{}]}),
    (400, 'tool_choice must be "none" or "auto"', {**X, "tool_choice": "required"}),
    (400, "preset must be one of", {**X, "h2o_prefill": {"settings": "best"}}),
    (400, "dense_layers must be < 2", {**X, "h2o_prefill": {"settings": "h2o,dense_layers=9"}}),
    (404, "model 'gpt' is not here", {**X, "model": "gpt"}),
    (400, "template: no", {"messages": [{"role": "assistant", "content": "x"}]}),
    (400, "body: Invalid JSON", b'{"prompt": '),
    (400, "body: Invalid JSON: recursion", b"[" * 9000),
    (400, "body: Input should be an object", b"[]"),
    (413, "body must be <= 20000 bytes", b"x" * 20_001),
    (413, "body must be <= 20000 bytes", itertools.repeat(b"x" * 5000)),  # without an end
]


def test_wrong_requests_are_named_and_touch_no_other(serve, monkeypatch):
    served = serve(max_body=20_000)
    for status, about, content in WRONG:
        path = "chat/completions" if "messages" in str(content) else "completions"
        found = served.post(content, path)
        error = found.json()["error"]
        assert (found.status_code, error["type"]) == (status, "invalid_request_error"), about
        assert re.search(about, error["message"]), error
    assert served.post(X, **{"Content-Type": "text/plain"}).status_code == 400
    assert served.post(X, Host="example.com").status_code == 403
    for path in ("health", "metrics", "v1/models", "v1/models/tiny"):
        found = httpx.get(f"{served.url}/{path}", headers={"Host": "example.com"})
        assert found.status_code == 403 and "at 127.0.0.1" in found.json()["error"]["message"]
    assert served.forwards == 0
    for kind in ("Application/JSON", "application/json ; charset=utf-8"):
        assert served.post(X, **{"Content-Type": kind}).status_code == 200
    monkeypatch.setattr(app_module, "_BODIES", 0.5)
    assert served.post(b"x" * 11_000).status_code == 429
    monkeypatch.setattr(app_module, "_BODY_SECONDS", 0.1)
    with served.connect() as slow:
        slow.sendall(HEAD + b"Content-Length: 9\r\n\r\n{")
        assert b" 408 " in slow.recv(999)
    assert served.ask().usage.completion_tokens == 12


GET = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"


@pytest.mark.parametrize(
    "said", [b"", b"G", GET, GET + b"\r\n" + GET, GET + b"Content-Length: 999999\r\n\r\n"]
)
def test_a_header_has_a_deadline(serve, monkeypatch, said):
    monkeypatch.setattr(server_module, "_HEADER_SECONDS", 0.5)
    served = serve()
    late = time.monotonic() + 20
    with served.connect() as slow:
        slow.settimeout(0.05)
        slow.sendall(said)
        with contextlib.suppress(ConnectionError):
            while time.monotonic() < late:
                with contextlib.suppress(TimeoutError):
                    if not slow.recv(999):
                        break
                    continue
                slow.send(said and b"x")
    assert time.monotonic() < late
    if not said:  # An answer may take longer.
        served.pause = 0.1
        assert served.ask().usage.completion_tokens == 12


def test_the_queue_is_bounded_and_clients_may_leave(serve):
    served = serve(queue=1)
    served.gate.clear()
    first = []
    running = threading.Thread(target=lambda: first.append(served.ask()))
    running.start()
    served.wait_for("running", 1)
    with served.connect() as waiting:
        waiting.sendall(HEAD + b'Content-Length: 15\r\n\r\n{"prompt": "x"}')
        served.wait_for("queued", 1)
        full = served.post(X)
        assert full.status_code == 429 and full.headers["Retry-After"] == "1"
    served.wait_for("queued", 0)
    served.gate.set()
    running.join()
    assert first[0].usage.completion_tokens == 12
    served.pause = 0.02
    stream = served.ask(max_tokens=380, stream=True)
    next(stream)
    stream.response.close()
    served.wait_for("cancelled_total", 1)
    served.pause = 0
    assert served.ask().usage.completion_tokens == 12


def test_the_end_refuses_those_that_wait(serve):
    served = serve()
    served.pause = 0.02
    stream = served.ask(max_tokens=380, stream=True)
    next(stream)
    served.gate.clear()
    found = []
    waiting = threading.Thread(target=lambda: found.append(served.post(X)))
    waiting.start()
    served.wait_for("queued", 1)
    served.worker.stop()
    waiting.join()
    assert [found[0].status_code, served.post(X).status_code] == [503, 503]
    assert httpx.get(f"{served.url}/health").status_code == 503
    # Its client need not wait until the model has noticed, nor need the process.
    assert not served.worker.close(0.1)
    with pytest.raises(openai.APIError, match="the server is stopping"):
        list(stream)
    served.gate.set()
    assert served.worker.close()


def test_a_failure_is_of_its_request_alone(serve, monkeypatch, caplog):
    served = serve()

    def broken(*_, **__):
        raise RuntimeError("not enough memory")

    with monkeypatch.context() as patch:
        patch.setattr(served.model, "generate", broken)
        with pytest.raises(openai.InternalServerError, match="internal error: RuntimeError"):
            served.ask()
    assert "not enough memory" in caplog.text
    assert served.ask().usage.completion_tokens == 12


@pytest.mark.parametrize(
    ("requests", "clients"), [(20, 4), pytest.param(200, 10, marks=pytest.mark.slow)]
)
def test_nothing_is_lost_under_load(serve, requests, clients):
    served = serve(prefix_bytes=1 << 20)
    load = Load(served.url, seed=1)
    load.run(clients, lambda done: done < requests)
    assert load.wrong == [] and set(load.done) >= {"answer", "stream", "abort", "refused"}
    served.wait_for("running", 0)
    served.wait_for("queued", 0)
    assert read_metrics(served.url)["prefix_cache_bytes"] <= 1 << 20
