#include "common/memory_sets.h"

#include <ATen/ops/cat.h>
#include <ATen/ops/constant_pad_nd.h>

#include <algorithm>
#include <bit>

namespace h2o_prefill {

WideningRule widening_of(const PrefillConfig& settings) {
  const auto most = static_cast<uint64_t>(settings.widens() ? settings.max_widen : 1);
  return {.threshold = settings.error_threshold,
          .most_doublings = static_cast<int64_t>(std::bit_width(most)) - 1};
}

std::vector<int64_t> measured_rows(const PrefillConfig& settings, int64_t begin, int64_t count) {
  const RowRange rows{.begin = 0, .count = count, .past = begin};
  const int64_t measured = std::min(settings.error_rows, count);
  std::vector<int64_t> offsets;
  for (int64_t i = 0; i < measured; ++i) offsets.push_back(error_row(rows, measured, i));
  return offsets;
}

std::vector<int32_t> factors_of_heads(const PrefillConfig& settings, const at::Tensor& errors,
                                      at::IntArrayRef sizes) {
  const auto here = errors.defined() ? errors.cpu().contiguous() : errors;
  const float* const known = here.defined() ? here.const_data_ptr<float>() : nullptr;
  const WideningRule rule = widening_of(settings);
  std::vector<int32_t> factors(sizes[0] * sizes[1]);
  for (int64_t unit = 0; unit < std::ssize(factors); ++unit) {
    const int64_t widened = known ? rule.factor(known + unit * kErrorFields) : 1;
    factors[unit] = static_cast<int32_t>(widened);
  }
  return factors;
}

void record_errors(const at::Tensor& errors, const at::Tensor& error, const WideningRule& rule) {
  const auto entries = errors.cpu().contiguous();
  const auto values = error.cpu().to(at::kDouble).contiguous();
  auto* entry = entries.mutable_data_ptr<float>();
  for (int64_t unit = 0; unit < values.numel(); ++unit, entry += kErrorFields) {
    rule.record(entry, values.const_data_ptr<double>()[unit]);
  }
  if (!entries.is_same(errors)) errors.copy_(entries);
}

at::Tensor select_sets(const at::Tensor& scores, const at::Tensor& sets, int64_t chunk_begin,
                       int64_t chunk_end, const MemoryBudget& budget,
                       const std::vector<int32_t>& factors, int64_t width) {
  const auto known = scores.narrow(2, 0, chunk_end);
  const auto select = [&](const at::Tensor& scores, const at::Tensor& sets,
                          const MemoryBudget& budget) {
    const auto [window, heavy, sinks] = budget.within(chunk_end);
    const auto selected = select_memory(scores, sets, chunk_begin, chunk_end, window, heavy, sinks);
    const int64_t members = std::min(selected.size(2), width);
    return at::constant_pad_nd(selected.narrow(2, 0, members), {0, width - members}, -1);
  };
  if (factors.empty() || std::ranges::all_of(factors, [&](auto x) { return x == factors[0]; })) {
    return select(known, sets, budget.scaled(factors.empty() ? 1 : factors[0]));
  }
  std::vector<at::Tensor> selected;
  for (int64_t unit = 0; unit < std::ssize(factors); ++unit) {
    const auto of_unit = [&](const at::Tensor& x) {
      return x.flatten(0, 1).narrow(0, unit, 1).unsqueeze(0);
    };
    selected.push_back(select(of_unit(known), of_unit(sets), budget.scaled(factors[unit])));
  }
  return at::cat(selected, 1).view({sets.size(0), sets.size(1), width});
}

at::Tensor next_memory(const PrefillState& state, const PrefillConfig& settings) {
  const auto budget = budget_of(settings);
  const auto factors = factors_of_heads(settings, state.errors, state.memory.sizes());
  const int32_t widest = factors.empty() ? 1 : std::ranges::max(factors);
  return select_sets(state.scores, state.memory, state.last_chunk_begin, state.scores.size(2),
                     budget, factors, budget.scaled(widest).width());
}

}  // namespace h2o_prefill
