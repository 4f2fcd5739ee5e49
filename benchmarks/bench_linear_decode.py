"""The decoding step of linear attention, against the same step in plain PyTorch."""

from __future__ import annotations

import torch
from common import options
from common.plan import Case, Lengths, Plan
from common.report import CASE_COLUMNS, Report, Row, speedup_fields
from common.timing import compare
from torch import Tensor

from h2o_prefill import ops

COLUMNS = {
    **CASE_COLUMNS,
    "tokens": "{length}",
    "us": "{microseconds:.1f}",
    "PyTorch us": "{pytorch_microseconds:.1f}",
    "PyTorch": "{speedup:.2f}x ({speedup_q1:.2f} to {speedup_q3:.2f})",
}
LENGTHS = Lengths(full=(1, 2, 4, 8, 16), quick=(1, 2))


@options.benchmark("linear_decode", "dtype", "shape", lengths=LENGTHS, seconds=2.0)
def main(plan: Plan) -> None:
    """Time chunkwise_linear_attention (elu+1) of few tokens that go on from a state.

    PyTorch takes one token at a time: baddbmm for the state, bmm for the queries.
    """
    title = "chunkwise_linear_attention (elu+1) with a state: beside the recurrence in PyTorch"
    with Report(plan, title, COLUMNS, lengths=plan.lengths) as report:
        for case in plan.cases():
            for length in plan.lengths:
                report.add(**case.fields, length=length, **_row(case, length, plan.seconds))


def _row(case: Case, length: int, seconds: float) -> Row:
    q, k, v = case.qkv(length)
    heads = case.heads
    state = torch.randn(1, heads.kv_heads, heads.head_dim, heads.head_dim)
    calls = {
        "linear": lambda: ops.chunkwise_linear_attention(q, k, v, None, state),
        "pytorch": lambda: decode(q, k, v, state),
    }
    with torch.no_grad():
        timings = compare(calls, seconds)
    return speedup_fields(timings, "linear", "pytorch", "microseconds")


def decode(q: Tensor, k: Tensor, v: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Attend token by token: out [1, Hq, T, Dv] of the dtype of q, and the state behind them."""
    kv_heads = k.shape[1]
    past = state[0]
    queries = torch.nn.functional.elu(q[0].float()) + 1
    keys = torch.nn.functional.elu(k[0].float()) + 1
    values = v[0].float()
    outs = []
    for t in range(q.shape[2]):
        past = torch.baddbmm(past, keys[:, t].unsqueeze(2), values[:, t].unsqueeze(1))
        outs.append(torch.bmm(queries[:, t].unflatten(0, (kv_heads, -1)), past).flatten(0, 1))
    return torch.stack(outs, 1).to(q.dtype).unsqueeze(0), past.unsqueeze(0)


app = options.command(main)

if __name__ == "__main__":
    app()
