"""Continues a text in several processes, each with some of the layers.

    torchrun --standalone --nproc-per-node 2 examples/distributed.py --text-file book.txt

Each process loads its layers alone and works on another chunk of the prompt. One process (`python
examples/distributed.py`) gives the same tokens.
"""

import argparse
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from transformers.distributed import DistributedConfig

from h2o_prefill import chunked_prefill, enable
from h2o_prefill.generation import DEFAULT_MODEL, load_model, load_text


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=DEFAULT_MODEL, help="as in h2o-prefill ppl")
    parser.add_argument("--text-file", type=Path, help="UTF-8 text; by default some English")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of the text to read")
    parser.add_argument("--new-tokens", type=int, default=32)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    count, distributed = int(os.environ.get("WORLD_SIZE", 1)), {}
    if count > 1:
        dist.init_process_group()  # gloo, and nccl for what is on GPUs
        distributed = {"distributed_config": DistributedConfig(pp_size=count)}
    model, tokenizer = load_model(options.model, options.dtype, **distributed)
    file = options.text_file
    text = load_text("pydoc").text if file is None else file.read_text(encoding="utf-8")
    ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"][:, : options.tokens]
    with enable(model, tokenizer=tokenizer):
        begin = time.monotonic()
        output = chunked_prefill(model, ids.to(model.device))
        seconds = time.monotonic() - begin
        first = output.logits[:, -1:].argmax(dim=-1)
        whole = torch.cat([ids.to(model.device), first], dim=1)
        steps = options.new_tokens - 1
        answer = model.generate(whole, cache=output.cache, max_new_tokens=steps, do_sample=False)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(tokenizer.decode(answer[0, ids.shape[1] :], skip_special_tokens=True))
        print(f"{ids.shape[1]} tokens were prefilled in {seconds:.2f} s.", file=sys.stderr)
    if count > 1:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
