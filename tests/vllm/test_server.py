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
from engines import CHUNK, SETTINGS

LENGTH = 5 * CHUNK + 9


@pytest.fixture(scope="module")
def address(folder, tmp_path_factory):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    options = {
        "--model": folder,
        "--served-model-name": "tiny",
        "--host": "127.0.0.1",
        "--port": port,
        "--dtype": "float32",
        "--max-model-len": 2048,
        "--max-num-seqs": 8,
        "--max-num-batched-tokens": 4 * CHUNK + 8,
        "--block-size": 32,
    }
    words = [str(x) for pair in options.items() for x in pair]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *words]
    # Elsewhere, where the sources are not found in the place of what is installed.
    home = tmp_path_factory.mktemp("server")
    log = home / "log"
    # Several processes, as it is served, with counters of their own.
    variables = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
    variables.pop("H2O_PREFILL_COUNTERS", None)
    url = f"http://127.0.0.1:{port}"
    with log.open("w") as out:
        command.append("--enforce-eager")
        server = subprocess.Popen(command, stdout=out, stderr=out, env=variables, cwd=home)
    try:
        end = time.monotonic() + 300
        while not _answers(f"{url}/health"):
            assert server.poll() is None and time.monotonic() < end, log.read_text()[-5000:]
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
        arguments = {"return_token_ids": True, **more}
        return client.completions.create(
            model="tiny", prompt=prompt, max_tokens=3, temperature=0, extra_body=arguments
        ).choices[0]

    first = ask(1)
    assert counters(address)["sparse_tokens_total"] == LENGTH
    assert ask(1).token_ids == first.token_ids
    ask(2)
    found = counters(address)
    assert found["state_hits_total"] == 2 and found["lost_tokens_total"] == 0
    assert found["checkpoint_bytes"] > 0
    ask(3, vllm_xargs={"h2o_prefill": "exact"})
    assert counters(address)["exact_tokens_total"] == LENGTH
    with pytest.raises(openai.BadRequestError, match="preset must be one of exact, recommended"):
        ask(4, vllm_xargs={"h2o_prefill": "fast"})
    with pytest.raises(openai.BadRequestError, match="hevy"):
        ask(4, vllm_xargs={"h2o_prefill": f"{SETTINGS},hevy=1"})
    assert ask(1).token_ids == first.token_ids


def test_an_engine_with_wrong_settings_does_not_start(folder, tmp_path):
    variables = {**os.environ, "H2O_PREFILL_SETTINGS": "fast"}
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder)]
    done = subprocess.run(
        command,
        env=variables,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode != 0
    message = 'H2O_PREFILL_SETTINGS: preset must be one of exact, recommended, h2o, got "fast"'
    assert message in done.stderr.strip().splitlines()[-1]
