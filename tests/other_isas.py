"""Print the instruction sets of the CPU kernels that this CPU has beside its default."""

import os

import torch


def isa_if_set_to(name: str) -> str:
    """Return what a process chooses where H2O_PREFILL_ISA is `name`; nothing if it is refused."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.environ["H2O_PREFILL_ISA"] = name
        try:
            import h2o_prefill  # noqa: F401

            os.write(writer, torch.ops.h2o_prefill.cpu_isa().encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.wait()
    with open(reader) as chosen:
        return chosen.read()


default = isa_if_set_to("")
for name in ("scalar", "avx2", "avx512", "avx512_bf16", "amx", "neon", "neon_bf16"):
    if isa_if_set_to(name) not in ("", default):
        print(name)
