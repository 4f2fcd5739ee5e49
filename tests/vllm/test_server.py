"""vLLM's server with the plugin, in processes of its own, asked by OpenAI's client."""

import os
import re
import socket
import subprocess
import sys
import time
import urllib.request

import openai
import pytest
from engines import CHUNK, OPTIONS, SETTINGS

LENGTH = 5 * CHUNK + 9
COMMAND = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model"]
# Several processes, as it is served, with counters of their own.
VARIABLES = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1", "H2O_PREFILL_COUNTERS": ""}


@pytest.fixture(scope="module")
def address(folder, tmp_path_factory):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {name: x for name, x in OPTIONS.items() if not isinstance(x, bool)}
    options |= {"served_model_name": "tiny", "host": "127.0.0.1", "port": port}
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    # Elsewhere, where the sources are not found in the place of what is installed.
    home, url = tmp_path_factory.mktemp("server"), f"http://127.0.0.1:{port}"
    with (home / "log").open("w") as log:
        command = [*COMMAND, str(folder), *words, "--enforce-eager"]
        server = subprocess.Popen(command, stdout=log, stderr=log, env=VARIABLES, cwd=home)
    try:
        end = time.monotonic() + 300
        while not _answers(f"{url}/health"):
            assert server.poll() is None and time.monotonic() < end, (home / "log").read_text()
            time.sleep(1)
        yield url
    finally:
        server.terminate()
        server.wait(60)


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


def test_a_server_answers_sparsely_and_shows_it(address, tokens):
    client = openai.OpenAI(base_url=f"{address}/v1", api_key="none")

    def ask(seed, **more):
        prompt = tokens(4 * CHUNK) + tokens(LENGTH - 4 * CHUNK, seed)
        asked = {"model": "tiny", "prompt": prompt, "max_tokens": 3, "temperature": 0}
        extra = {"return_token_ids": True, **more}
        return client.completions.create(**asked, extra_body=extra).choices[0].token_ids

    first = ask(1)
    assert counters(address)["sparse_tokens_total"] == LENGTH
    assert ask(1) == first
    ask(2)
    found = counters(address)
    assert found["state_hits_total"] == 2 and found["lost_tokens_total"] == 0
    assert found["checkpoint_bytes"] > 0
    ask(3, vllm_xargs={"h2o_prefill": "exact"})
    assert counters(address)["exact_tokens_total"] == LENGTH
    for wrong, message in {"fast": "preset must be one", f"{SETTINGS},hevy=1": "hevy"}.items():
        with pytest.raises(openai.BadRequestError, match=message):
            ask(4, vllm_xargs={"h2o_prefill": wrong})
    assert ask(1) == first


def test_an_engine_with_wrong_settings_does_not_start(folder, tmp_path):
    variables = {**VARIABLES, "H2O_PREFILL_SETTINGS": "fast"}
    options = {"env": variables, "cwd": tmp_path, "capture_output": True, "timeout": 200}
    done = subprocess.run([*COMMAND, str(folder)], **options, text=True, check=False)
    assert done.returncode != 0
    message = 'H2O_PREFILL_SETTINGS: preset must be one of exact, recommended, h2o, got "fast"'
    assert message in done.stderr.strip().splitlines()[-1]
