#include "h2o_prefill/crossover.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <map>
#include <vector>

#include "common/config_fields.h"
#include "common/device_costs.h"
#include "h2o_prefill/library.h"

namespace h2o_prefill {
namespace {

// Less gain than this is not worth the loss.
constexpr double kLeastGain = 1.05;
constexpr int64_t kMostChunks = 1024;
// Lengths of each chunk at which costs are compared.
constexpr int64_t kLengthsOfChunk = 8;

// On WikiText-2 and in books: the mean factor by which errors widen memory sets after the first two
// chunks, and the keys that a block of rows recalls, as a share of its rows' matches.
constexpr double kMeanWidening = 1.6;
constexpr double kRecalledShare = 0.2;

// Products of the sparse attention of one head, chunk by chunk.
class SparseProducts {
 public:
  SparseProducts(const PrefillConfig& config, int64_t factor) : config_(config), factor_(factor) {}

  // With `rows` rows of the next chunk.
  double with(int64_t rows) const {
    const auto begin = static_cast<double>(begin_), count = static_cast<double>(rows);
    const double tail = static_cast<double>(std::min(rows, config_.dense_tail));
    double all = before_ + count * (count + 1) / 2 + tail * begin;
    if (begin_ == 0) return all;
    // The errors of the second chunk are the first to be measured.
    const bool wide = config_.widens() && begin_ > config_.chunk_size;
    const double widening =
        wide ? std::min(kMeanWidening, static_cast<double>(config_.max_widen)) : 1.0;
    const double memory =
        static_cast<double>(config_.sink_tokens) +
        widening * static_cast<double>(factor_ * (config_.local_window + config_.heavy_budget));
    const double recalled =
        kRecalledShare * static_cast<double>(config_.recall_block() * config_.recall * kRecallSpan);
    all += count * (std::min(begin, memory) + std::min(begin, recalled));
    return all + static_cast<double>(std::min(rows, config_.error_rows)) * begin;
  }

  void end_chunk() {
    before_ = with(config_.chunk_size);
    begin_ += config_.chunk_size;
  }

 private:
  const PrefillConfig& config_;
  int64_t factor_;
  int64_t begin_ = 0;
  double before_ = 0;
};

// How many heads of all layers that are not dense have each factor.
std::map<int64_t, int64_t> heads_by_factor(const PrefillConfig& config, int64_t layers,
                                           int64_t kv_heads) {
  std::map<int64_t, int64_t> heads;
  for (int64_t layer = 0; layer < layers; ++layer) {
    if (config.is_dense_layer(layer)) continue;
    for (int64_t head = 0; head < kv_heads; ++head) ++heads[config.factor_of_head(head, layer)];
  }
  return heads;
}

std::string device_name(const at::Device& device) {
  if (device.is_cpu()) return cpu_isa();
  const auto arch = c10::Dispatcher::singleton().findSchema({"h2o_prefill::cuda_arch", ""});
  if (!device.is_cuda() || !arch) return device.str();
  torch::jit::Stack stack;
  arch->callBoxed(stack);
  return stack.back().toStringRef();
}

}  // namespace

DeviceCost device_cost(const at::Device& device, at::ScalarType dtype) {
  DeviceCost cost{.device = device_name(device),
                  .sparse_product = device.is_cpu() ? kLargestCpuCost : kLargestCost,
                  .measured = false};
  const bool is_16_bit = c10::elementSize(dtype) == 2;
  for (const CostRow& row : kDeviceCosts) {
    if (row.device != cost.device || row.is_16_bit != is_16_bit) continue;
    cost.sparse_product = row.sparse_product;
    cost.measured = true;
  }
  return cost;
}

int64_t shortest_sparse_prompt(const PrefillConfig& config, double sparse_product, int64_t layers,
                               int64_t kv_heads) {
  struct Heads {
    SparseProducts products;
    int64_t count;
  };
  std::vector<Heads> sparse;
  int64_t count = 0;
  for (const auto& [factor, heads] : heads_by_factor(config, layers, kv_heads)) {
    sparse.push_back({SparseProducts(config, factor), heads});
    count += heads;
  }
  const int64_t size = config.chunk_size, step = std::max<int64_t>(size / kLengthsOfChunk, 1);
  int64_t shortest = size;
  for (int64_t chunk = 0; chunk < kMostChunks; ++chunk) {
    for (int64_t rows = step; rows <= size; rows += step) {
      const int64_t tokens = chunk * size + rows;
      const double dense = static_cast<double>(tokens) * static_cast<double>(tokens + 1) / 2;
      double products = 0;
      for (const Heads& x : sparse) {
        products += static_cast<double>(x.count) * x.products.with(rows);
      }
      const double gain = static_cast<double>(count) * dense / (sparse_product * products);
      if (count > 0 && gain < kLeastGain) shortest = tokens + step;
    }
    for (Heads& x : sparse) x.products.end_chunk();
  }
  return shortest > kMostChunks * size ? kLargestSetting : shortest;
}

}  // namespace h2o_prefill
