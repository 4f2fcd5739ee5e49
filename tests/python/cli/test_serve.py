"""`serve` as a program: signals, and packages that are missing. The server has tests of its own."""

import contextlib
import json
import os
import signal
import socket
import sys
import threading
import time

import pytest

httpx = pytest.importorskip("httpx")
pytest.importorskip("transformers")


@pytest.fixture
def url():
    """Where a server can be, on a port that is free."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"http://127.0.0.1:{free.getsockname()[1]}"


def _wait_for(url, found):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            if found in httpx.get(url).text:
                return
        time.sleep(0.05)


def test_connections_are_bounded_and_a_signal_lets_the_running_answer_end(
    run, small_commands, url, monkeypatch
):
    pytest.importorskip("uvicorn")
    monkeypatch.setattr("h2o_prefill.serving.server._GRACE_SECONDS", 60)
    monkeypatch.setattr("h2o_prefill.serving.server._Connection.most", 8)
    port = int(url.rpartition(":")[2])
    lines = []

    def ask():
        _wait_for(f"{url}/health", '{"status":"ok"}')
        address = ("127.0.0.1", port)
        with contextlib.ExitStack() as stack:
            idle = [stack.enter_context(socket.create_connection(address)) for _ in range(9)]
            assert b" 503 " in idle[-1].recv(99)
        body = {"prompt": "Sphinx", "max_tokens": 300, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as answer:
            found = answer.iter_lines()
            next(found, None)
            os.kill(os.getpid(), signal.SIGTERM)
            lines.extend(line for line in found if line)

    client = threading.Thread(target=ask)
    client.start()
    done = run(*small_commands["serve"], "--port", port)
    client.join()
    assert done.exit_code == 0 and done.stderr.endswith("stopped\n"), done.stderr
    assert f"http://127.0.0.1:{port}/v1" in done.stderr
    assert lines[-1] == "data: [DONE]"
    assert json.loads(lines[-2][6:])["choices"][0]["finish_reason"] == "length"


def test_a_signal_does_not_wait_for_a_long_layer(run, small_commands, url, monkeypatch):
    pytest.importorskip("uvicorn")
    layer_ends, said = threading.Event(), []

    def leave(code):
        said.append(code)
        layer_ends.set()

    monkeypatch.setattr("h2o_prefill.serving.server._GRACE_SECONDS", 0)
    monkeypatch.setattr(
        "h2o_prefill.serving.worker.generate_greedily", lambda *_, **__: layer_ends.wait(30)
    )
    monkeypatch.setattr("os._exit", leave)

    def ask():
        _wait_for(f"{url}/health", "ok")
        found = httpx.post(f"{url}/v1/completions", json={"prompt": "Sphinx"}, timeout=60)
        said.append(found.status_code)

    def end():
        _wait_for(f"{url}/metrics", "h2o_prefill_running 1\n")
        os.kill(os.getpid(), signal.SIGTERM)

    others = [threading.Thread(target=ask), threading.Thread(target=end)]
    for other in others:
        other.start()
    run(*small_commands["serve"], "--port", url.rpartition(":")[2])
    for other in others:
        other.join()
    assert said == [503, 0]


def test_without_its_packages_it_says_what_to_install(run, monkeypatch):
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.delitem(sys.modules, "h2o_prefill.serving.server", raising=False)
    done = run("serve")
    assert done.exit_code == 1
    expected = "error: serve needs FastAPI and uvicorn: pip install 'h2o_prefill[serve]'\n"
    assert done.stderr == expected
