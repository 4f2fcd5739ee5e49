"""Runs command lines in processes that begin with everything imported, one at a time.

Prints its own process id when it is ready. Reads a line of JSON for each command line,
{"arguments": [...], "log": file of stdout and stderr}; prints its process id when it begins, and
its exit code when it ends.
"""

from __future__ import annotations

import json
import os
import sys

import matplotlib.backends.backend_agg
import matplotlib.figure
import pandas
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

import h2o_prefill.hf
from h2o_prefill.cli import load

IMPORTED = (
    matplotlib.backends.backend_agg,
    matplotlib.figure,
    pandas,
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaForCausalLM,
    h2o_prefill.hf.enable,
)


def run(arguments: list[str], log: str) -> None:
    """Run a command line, and end the process."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(file, 1)
    os.dup2(file, 2)
    code = 1
    try:
        app(arguments, prog_name="h2o-prefill")
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    os._exit(code)


app = load()
print(os.getpid(), flush=True)
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        run(**json.loads(line))
    print(child, flush=True)
    _, status = os.waitpid(child, 0)
    print(os.waitstatus_to_exitcode(status), flush=True)
