"""Programs that prefill one model, each in several modes and formats of its weights."""

from __future__ import annotations

import importlib.util
import itertools
import subprocess
import sys
import time
import venv
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from common.worker import Worker
from h2o_prefill.config import PrefillConfig
from h2o_prefill.generation.packages import write_package

# The program of the modes of this library.
OURS = "h2o_prefill"

# Whether llama.cpp takes its flash attention, and how many tokens at a time.
_LLAMA_CPP_GRID = [
    {"flash": flash, "batch": batch}
    for flash, batch in itertools.product((False, True), (512, 2048))
]


@dataclass(frozen=True)
class Mode:
    """A program, and a mode of it."""

    # Its name or its package's, and how many bits its weights have.
    program: str
    bits: int
    # The name of the mode that its loss is measured against: itself, if it is dense.
    dense: str
    # What a `Worker` takes.
    loader: str
    arguments: Mapping[str, Any]
    python: Path = Path(sys.executable)
    # Whether it tells the probabilities of a prompt's tokens.
    scores: bool = True
    # Whether its decoding is timed: once for each format, as the prefill makes no difference.
    decodes: bool = False

    def start(self) -> Worker:
        """Start it in a process of its own."""
        return Worker(self.python, self.loader, self.arguments)


class Programs:
    """Makes the modes of programs for one model, and their environments and files in a folder."""

    def __init__(self, folder: Path, model: str, dtype: str, threads: int, longest: int) -> None:
        """Our weights have `dtype`; prompts and decoded tokens are at most `longest`."""
        self._folder, self._model, self._dtype = folder, model, dtype
        # What is made of this model's weights; environments are of no model.
        self._formats = folder / f"{Path(model).name.removesuffix('.gguf')}-{dtype}"
        self._formats.mkdir(parents=True, exist_ok=True)
        self._threads, self._longest = threads, longest
        self.dense = f"transformers {dtype}"
        self._bits = 32 if dtype == "float32" else 16

    def transformers(self) -> dict[str, Mode]:
        """Return transformers with PyTorch's SDPA."""
        return {self.dense: self._transformers("transformers", decodes=True)}

    def flex(self) -> dict[str, Mode]:
        """Return transformers with Tri-shape by compiled FlexAttention."""
        return {"flex tri-shape": self._transformers("transformers", attention="tri-shape")}

    def zentorch(self) -> dict[str, Mode]:
        """Return transformers compiled by zentorch, which must be installed here."""
        if importlib.util.find_spec("zentorch") is None:
            minor = ".".join(torch.__version__.split(".")[:2])
            raise ImportError(f"pip install zentorch=={minor}.*")
        mode = self._transformers("zentorch", "zentorch", decodes=True, backend="zentorch")
        return {"zentorch": mode}

    def ours(self, configs: Mapping[str, PrefillConfig]) -> dict[str, Mode]:
        """Return models that are enabled with each of the settings, by name."""
        modes: dict[str, Mode] = {}
        for name, config in configs.items():
            options: dict[str, Any] = {"settings": config.to_string(), "decodes": not modes}
            modes[f"{OURS} {name}"] = self._transformers(OURS, **options)
        return modes

    def packages(
        self,
        model: Any,
        tokenizer: Any,
        configs: Mapping[str, PrefillConfig],
        bits: Sequence[int],
    ) -> dict[str, Mode]:
        """Export a model with each of the settings; with 8 `bits`, with int8 weights as well."""
        modes: dict[str, Mode] = {}
        formats = [("", 16), *([("int8", 8)] if 8 in bits else [])]
        for weights, count in formats:
            kind = f"{weights} package".strip()
            dense = f"{OURS} exact, {kind}" if weights and "exact" in configs else self.dense
            for number, (name, config) in enumerate(configs.items()):
                path = self._formats / f"{number}{weights}"
                write_package(model, tokenizer, config, self._longest, path, weights)
                arguments = {"path": str(path), "threads": self._threads}
                modes[f"{OURS} {name}, {kind}"] = Mode(
                    OURS, count, dense, "common.packages:Package", arguments, decodes=number == 0
                )
        return modes

    def openvino(
        self, model: Any, tokenizer: Any, bits: Sequence[int]
    ) -> Iterator[tuple[str, Mode]]:
        """Go through OpenVINO GenAI: dense, XAttention, and Tri-shape at its best batch of 256.

        A batch of XAttention is the whole prompt: between batches it loses several times more. A
        dense one has at most 8,192 tokens, so that activations of long prompts fit into memory.
        """
        python = self._environment("openvino", "optimum-intel[openvino,nncf]", "openvino-genai")
        source = self._pretrained(model, tokenizer)
        whole = {"batch": -(-self._longest // 256) * 256}
        for count in bits:
            kind = "fp16" if count == 16 else f"int{count}"
            target = self._formats / f"openvino_{kind}"
            if not target.exists():
                task = ["--task", "text-generation-with-past", "--weight-format", kind]
                # Of 128 by default, which must divide the width of every layer.
                task += ["--group-size", "64"] if count == 4 else []
                tool = python.with_name("optimum-cli")
                scratch = target.with_suffix(".part")
                _run(tool, "export", "openvino", "--model", source, *task, scratch)
                scratch.rename(target)
            dense = f"openvino {kind} dense"
            float32 = self._dtype == "float32"
            shared = {"folder": str(target), "threads": self._threads, "float32": float32}
            modes: dict[str, dict[str, Any]] = {
                "dense": {"batch": min(whole["batch"], 8192)},
                "xattention 0.95": {**whole, "mode": "XATTENTION", "xattention_threshold": 0.95},
                "tri-shape": {"batch": 256, "mode": "TRISHAPE"},
            }
            if count == 16:
                modes["xattention 0.8"] = {**whole, "mode": "XATTENTION"}
            for name, fields in modes.items():
                made = ("common.peers:OpenvinoPaged", shared | fields, python)
                mode = Mode("openvino", count, dense, *made, decodes=name == "dense")
                yield f"openvino {kind} {name}", mode
            if count == 16:
                made, name = ("common.peers:OpenvinoSdpa", shared, python), f"openvino {kind} sdpa"
                yield name, Mode("openvino", count, name, *made, scores=False)

    def llama_cpp(self, gguf: Path, bits: Sequence[int]) -> Iterator[tuple[str, Mode]]:
        """Go through llama.cpp's formats, each at the fastest of a few settings."""
        python = self._environment("llama_cpp", "llama-cpp-python")
        for count in bits:
            kind = {16: "BF16", 8: "Q8_0", 4: "Q4_0"}[count]
            file = self._formats / f"{kind.lower()}.gguf"
            if not file.exists():
                formats = Worker(python, "common.peers:LlamaCppFormats", {})
                formats.write(str(gguf), str(file), kind)
                formats.close()
            shared = {"file": str(file), "threads": self._threads, "longest": self._longest}
            modes = [
                Mode("llama.cpp", count, name, "common.peers:LlamaCpp", shared | fields, python)
                for name in [f"llama.cpp {kind}"]
                for fields in _LLAMA_CPP_GRID
            ]
            yield modes[0].dense, replace(min(modes, key=self._seconds), decodes=True)

    def executorch(
        self, model: Any, tokenizer: Any, bits: Sequence[int]
    ) -> Iterator[tuple[str, Mode]]:
        """Go through ExecuTorch's formats for XNNPACK, each at the fastest of two batches."""
        python = self._environment("executorch", "executorch", "optimum-executorch")
        source = self._pretrained(model, tokenizer)
        task = ["--task", "text-generation", "--recipe", "xnnpack", "--dtype", "float32"]
        task += ["--use_custom_sdpa", "--use_custom_kv_cache"]
        for count in [32, *(x for x in bits if x in (8, 4))]:
            target = self._formats / f"executorch_{count}"
            if not target.exists():
                kind = [] if count == 32 else ["--qlinear", f"8da{count}w", "--qembedding", "8w"]
                scratch = target.with_suffix(".part")
                what = ["--model", source, "--max_seq_len", self._longest, "--output_dir", scratch]
                tool = python.with_name("optimum-cli")
                _run(tool, "export", "executorch", *task, *kind, *what)
                scratch.rename(target)
            shared = {"file": str(target / "model.pte"), "threads": self._threads}
            name, loader = f"executorch {count} bits", "common.peers:ExecuTorch"
            modes = [
                Mode("executorch", count, name, loader, shared | {"batch": batch}, python)
                for batch in (128, 512)
            ]
            yield name, replace(min(modes, key=self._seconds), decodes=True)

    def vllm(self, model: Any, tokenizer: Any, python: Path) -> dict[str, Mode]:
        """Return vLLM's CPU build, in an environment that has it."""
        if not python.exists():
            raise ImportError(f"--vllm must be the Python of an environment, got '{python}'")
        arguments = {
            "folder": str(self._pretrained(model, tokenizer)),
            "threads": self._threads,
            "longest": self._longest,
        }
        mode = Mode("vllm", 16, "vllm", "common.peers:Vllm", arguments, python)
        return {"vllm": mode}

    def engine(self, model: Any, tokenizer: Any, python: Path) -> Worker:
        """Start vLLM with this library's plugin, in an environment that has both."""
        folder = str(self._pretrained(model, tokenizer))
        arguments = {"folder": folder, "threads": self._threads, "dtype": self._dtype}
        return Worker(python, "common.engine:Engine", arguments)

    def _pretrained(self, model: Any, tokenizer: Any) -> Path:
        """Return the model as a folder of transformers."""
        if Path(self._model).is_dir():
            return Path(self._model)
        folder = self._formats / "huggingface"
        if not folder.exists():
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        return folder

    def _transformers(
        self, program: str, dense: str = "", decodes: bool = False, **options: Any
    ) -> Mode:
        shared = {"model": self._model, "threads": self._threads, "dtype": self._dtype}
        arguments = {**shared, **options}
        loader = "common.ours:Transformers"
        return Mode(program, self._bits, dense or self.dense, loader, arguments, decodes=decodes)

    def _environment(self, name: str, *packages: str) -> Path:
        """Return the Python of an environment with packages; made when it is first needed."""
        folder = self._folder / "environments" / name
        python, finished = folder / "bin" / "python", folder / "finished"
        if not finished.exists():
            venv.create(folder, with_pip=True, clear=True)
            _run(python, "-m", "pip", "install", "--quiet", *packages)
            finished.touch()
        return python

    def _seconds(self, mode: Mode) -> float:
        """Return the time of a short prefill."""
        worker, prompt = mode.start(), list(range(min(1000, self._longest - 1)))
        try:
            worker.prefill(prompt)
            begin = time.perf_counter()
            worker.prefill(prompt)
            return time.perf_counter() - begin
        finally:
            worker.close()


def _run(*command: object) -> None:
    """Run a command; raise ImportError, with the end of what it said, if it fails."""
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip()).splitlines()[-1:]
        raise ImportError(f"{Path(str(command[0])).name} failed: {' '.join(last)}")
