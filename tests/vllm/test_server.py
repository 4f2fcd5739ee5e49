"""vLLM's server with the plugin, in processes of its own, asked by OpenAI's client."""

import contextlib
import functools
import json
import os
import re
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request

import openai
import psutil
import pytest
from engines import CHUNK, OPTIONS, SETTINGS

from h2o_prefill.vllm.counters import Counters, shared_path

LENGTH = 5 * CHUNK + 9
COMMAND = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]
# Several processes, as it is served, beside an engine whose environment they inherit.
VARIABLES = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
VARIABLES |= {"H2O_PREFILL_COUNTERS": shared_path(), "VLLM_LOGGING_LEVEL": "INFO"}
Counters(shared_path())["sparse_tokens"] = 1e6


@contextlib.contextmanager
def serve(folder, home, **more):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {name: x for name, x in OPTIONS.items() if not isinstance(x, bool)}
    options |= {"served_model_name": "tiny", "host": "127.0.0.1", "port": port, **more}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    # Elsewhere, where the sources are not found in the place of what is installed.
    url = f"http://127.0.0.1:{port}"
    with (home / "log").open("w") as log:
        command = [*COMMAND, str(folder), *words, "--enforce-eager"]
        variables = {**VARIABLES, "TMPDIR": str(home)}
        process = subprocess.Popen(command, stdout=log, stderr=log, env=variables, cwd=home)
    try:
        end = time.monotonic() + 300
        while not _answers(f"{url}/health"):
            assert process.poll() is None and time.monotonic() < end, (home / "log").read_text()
            time.sleep(1)
        yield process, url, home
    finally:
        process.terminate()
        process.wait(60)


@pytest.fixture(scope="module")
def server(folder, tmp_path_factory):
    with serve(folder, tmp_path_factory.mktemp("server")) as served:
        yield served


def _answers(url):
    try:
        with urllib.request.urlopen(url, timeout=5) as reply:
            return reply.status == 200
    except OSError:
        return False


def counters(address):
    with urllib.request.urlopen(f"{address}/metrics") as reply:
        found = re.findall(r"^h2o_prefill_(\w+) (\S+)$", reply.read().decode(), re.MULTILINE)
    return {name: float(value) for name, value in found}


def post(url, **body):
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as reply:
        return json.load(reply)


def client_of(address):
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none", timeout=60, max_retries=0)
    return functools.partial(client.completions.create, model="tiny", temperature=0)


def test_a_server_answers_sparsely_and_shows_it(server, tokens):
    address = server[1]
    create = client_of(address)

    def ask(seed, **more):
        prompt = tokens(4 * CHUNK) + tokens(LENGTH - 4 * CHUNK, seed)
        extra = {"return_token_ids": True, **more}
        return create(prompt=prompt, max_tokens=3, extra_body=extra).choices[0].token_ids

    first = ask(1)
    assert counters(address)["sparse_tokens_total"] == LENGTH
    assert ask(1) == first
    ask(2)
    found = counters(address)
    assert found["state_hits_total"] == 2 and found["lost_tokens_total"] == 0
    assert found["checkpoint_bytes"] > 0
    ask(3, vllm_xargs={"h2o_prefill": "exact"})
    assert counters(address)["exact_tokens_total"] == LENGTH
    for wrong, message in {
        "fast": "h2o_prefill: preset must be one",
        f"{SETTINGS},hevy=1": "hevy",
    }.items():
        for more in {}, {"stream": True}:
            with pytest.raises(openai.BadRequestError, match=message):
                ask(4, vllm_xargs={"h2o_prefill": wrong}, **more)
    beams = {"use_beam_search": True, "n": 2}
    with pytest.raises(openai.BadRequestError, match="beam search, have no settings of their own"):
        ask(4, vllm_xargs={"h2o_prefill": "exact"}, **beams)
    scoring = {"query": [1, 2], "items": [[3]], "label_token_ids": [4, 5]}
    with pytest.raises(urllib.error.HTTPError, match="400"):
        post(f"{address}/generative_scoring", vllm_xargs={"h2o_prefill": "fast"}, **scoring)
    assert post(f"{address}/generative_scoring", **scoring)
    assert ask(1) == first
    ask(5, vllm_xargs={"h2o_prefill": f"{SETTINGS},error_rows=8"})
    ask(6)
    found = counters(address)
    assert found["estimated_kl_count"] == 1 and found["estimated_kl_sum"] > 0


def test_a_worker_that_is_killed_ends_in_an_error(server, tokens):
    process, address, home = server
    create = client_of(address)
    answer = create(prompt=tokens(LENGTH), max_tokens=1000, stream=True)
    next(answer)
    processes = psutil.Process(process.pid).children(recursive=True)
    (worker,) = [x for x in processes if "Worker" in "".join(x.cmdline())]
    worker.kill()
    with pytest.raises(openai.APIError):
        list(answer)
    process.wait(60)
    with pytest.raises(openai.APIConnectionError):
        create(prompt=tokens(LENGTH))
    assert not list(home.glob("h2o_prefill-*"))
    left = [x for x in processes if x.is_running()]
    assert all(x.status() == psutil.STATUS_ZOMBIE for x in left)


def test_an_engine_with_wrong_settings_does_not_start(folder, tmp_path):
    variables = {**VARIABLES, "H2O_PREFILL_SETTINGS": "fast"}
    options = {"env": variables, "cwd": tmp_path, "capture_output": True, "timeout": 200}
    done = subprocess.run([*COMMAND, str(folder)], **options, text=True, check=False)
    assert done.returncode != 0
    message = 'H2O_PREFILL_SETTINGS: preset must be one of exact, recommended, h2o, got "fast"'
    assert message in done.stderr.strip().splitlines()[-1]
