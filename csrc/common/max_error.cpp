#include "common/max_error.h"

#include <ATen/ATen.h>

namespace h2o_prefill {
namespace {

// Rows of one batch row, a chunk, as a request of their own. The chunks before have left their
// memory set in the request.
PrefillRequest of_chunk(const PrefillRequest& request, int64_t b, const RowRange& rows,
                        int64_t last_chunk_begin) {
  const auto row = [&](const at::Tensor& x) {
    return x.defined() ? x.narrow(0, b, 1) : at::Tensor();
  };
  PrefillRequest part = request;
  part.query = row(request.query).narrow(2, rows.begin, rows.count);
  part.key = row(request.key).narrow(2, 0, rows.position() + rows.count);
  part.value = row(request.value).narrow(2, 0, rows.position() + rows.count);
  part.scores = row(request.scores);
  part.memory = row(request.memory);
  part.start = rows.begin > 0 ? part.memory : row(request.start);
  part.errors = row(request.errors);
  part.last_chunk_begin = last_chunk_begin;
  if (request.recalls()) {
    const int64_t block = request.settings.recall_block;
    part.recall.offsets = request.recall.offsets.narrow(
        0, b * request.recall_blocks() + rows.begin / block, (rows.count + block - 1) / block + 1);
  }
  // The dense tail is that of the call.
  const int64_t after = request.length() - rows.begin - rows.count;
  part.settings.dense_tail = std::max<int64_t>(0, request.settings.dense_tail - after);
  return part;
}

bool is_dense(const at::Tensor& errors) {
  return errors.select(2, kDoublings).min().item<float>() == kDense;
}

// Writes one batch row's output.
void attend_row(const PrefillRequest& request, int64_t b, at::Tensor out, SparseAttention sparse,
                DenseAttention dense) {
  const at::Tensor errors = request.errors.narrow(0, b, 1);
  bool goes_on = !is_dense(errors);
  int64_t row = 0;  // where the next sparse chunk begins, in the end the dense rows
  int64_t last_chunk_begin = request.last_chunk_begin;
  for_each_chunk(request, [&](const RowRange& rows) {
    if (!goes_on) return;
    const at::Tensor before = errors.select(2, kErrorSum).clone();
    out.narrow(2, rows.begin, rows.count)
        .copy_(sparse(of_chunk(request, b, rows, last_chunk_begin)));
    const at::Tensor error = (errors.select(2, kErrorSum) - before).mean();
    if (error.item<double>() > request.settings.max_error) {
      errors.select(2, kDoublings).fill_(kDense);
      goes_on = false;
    }
    row = rows.begin + rows.count;
    last_chunk_begin = rows.position();
  });
  const at::Tensor memory = request.memory.narrow(0, b, 1);
  if (row == 0 && !request.memory.is_same(request.start)) {
    memory.fill_(-1);
    if (request.start.defined()) {
      const int64_t width = std::min(memory.size(2), request.start.size(2));
      memory.narrow(2, 0, width).copy_(request.start.narrow(0, b, 1).narrow(2, 0, width));
    }
  }
  const int64_t left = request.length() - row;
  if (left == 0) return;
  request.scores.narrow(0, b, 1).narrow(2, request.past() + row, left).zero_();
  out.narrow(2, row, left)
      .copy_(dense(request.query.narrow(0, b, 1).narrow(2, row, left), request.key.narrow(0, b, 1),
                   request.value.narrow(0, b, 1), request.softmax_scale, request.sinks,
                   request.softcap));
}

}  // namespace

at::Tensor attend_up_to_max_error(const PrefillRequest& request, SparseAttention sparse,
                                  DenseAttention dense) {
  if (request.settings.max_error == 0.0) return sparse(request);
  at::Tensor out = request.empty_out();
  for (int64_t b = 0; b < request.query.size(0); ++b) {
    attend_row(request, b, out.narrow(0, b, 1), sparse, dense);
  }
  return out;
}

}  // namespace h2o_prefill
