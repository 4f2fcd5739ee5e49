#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>
#include <limits>

#include "common/checks.h"
#include "kernels/composite/composite.h"

namespace h2o_prefill::composite {

// Every shape depends on the arguments alone and no value is read back, so no device has to be
// waited for.
at::Tensor select_memory(const at::Tensor& scores, const at::Tensor& sets, int64_t chunk_begin,
                         int64_t chunk_end, int64_t local_window, int64_t heavy_budget,
                         int64_t sink_tokens) {
  check_select_memory(scores, sets, chunk_begin, chunk_end, local_window, heavy_budget,
                      sink_tokens);
  const int64_t width = sink_tokens + local_window + heavy_budget;
  // Positions of ascending sets, so there are no more of them than positions.
  const auto memory = sets.narrow(2, 0, std::min(sets.size(2), chunk_end));
  constexpr int32_t kAbsent = std::numeric_limits<int32_t>::max();  // sorts after every position
  const int64_t local_begin = std::max<int64_t>(chunk_end - local_window, 0);
  const int64_t sink_end = std::min(sink_tokens, local_begin);
  const auto options = memory.options();
  const auto heads = std::vector<int64_t>{memory.size(0), memory.size(1), -1};
  const auto range = [&](int64_t begin, int64_t end) {
    return at::arange(begin, end, options).expand(heads);
  };

  // Candidates by rising position, so that a stable sort by score leaves the lower position first.
  const auto earlier = at::where((memory >= 0).logical_and(memory < chunk_begin), memory, kAbsent);
  const auto candidates = at::cat({earlier, range(chunk_begin, chunk_end)}, -1);
  const auto eligible = (candidates >= sink_end).logical_and(candidates < local_begin);
  const int64_t covered = std::min(scores.size(2), chunk_end);
  const auto known =
      at::constant_pad_nd(scores.narrow(2, 0, covered), {0, chunk_end - covered + 1});
  const auto index = at::where(eligible, candidates, chunk_end).to(at::kLong);
  const auto score = at::where(
      eligible, at::nan_to_num(known.gather(2, index), -std::numeric_limits<float>::max()),
      -std::numeric_limits<double>::infinity());
  const auto order = std::get<1>(at::sort(score, /*stable=*/true, -1, /*descending=*/true));
  const int64_t taken = std::min(heavy_budget, candidates.size(2));
  const auto heavy = at::where(eligible, candidates, kAbsent).gather(2, order.narrow(2, 0, taken));

  const auto chosen = at::cat({range(0, sink_end), heavy, range(local_begin, chunk_end)}, -1);
  const auto ascending = std::get<0>(at::sort(chosen, -1));
  const auto present = ascending.masked_fill(ascending == kAbsent, -1);
  return at::constant_pad_nd(present, {0, width - chosen.size(2)}, -1);
}

TORCH_LIBRARY_IMPL(h2o_prefill, CompositeExplicitAutograd, m) {
  m.impl("select_memory", &select_memory);
}

}  // namespace h2o_prefill::composite
