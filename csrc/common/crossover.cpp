#include "h2o_prefill/crossover.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <algorithm>
#include <vector>

#include "common/config_fields.h"

namespace h2o_prefill {
namespace {

// The time of a query-key product in sparse attention, in products of the fastest dense attention
// of a device: of this library on CPUs, of PyTorch on GPUs. `benchmarks/layer.py crossover`
// measures a device and prints its row.
struct CostRow {
  std::string_view device;  // cpu_isa(), or the architecture of the CUDA kernels
  bool is_16_bit;
  double sparse_product;
};

// x86: 9/3 heads of 64 and 32/8 heads of 128; the float32 kernels of avx512, avx512_bf16 and amx
// are the same. sm_90a: an H200 beside cuDNN, 8,192 to 131,072 tokens.
constexpr CostRow kDeviceCosts[] = {
    {"avx2", false, 1.05},  {"avx2", true, 1.05},         {"avx512", false, 1.10},
    {"avx512", true, 1.10}, {"avx512_bf16", false, 1.10}, {"avx512_bf16", true, 0.95},
    {"amx", false, 1.10},   {"amx", true, 1.30},          {"sm_90a", true, 4.0},
};

// Of devices that nobody has measured: CPUs, whose kernels have the same source, and others.
constexpr double kLargestCpuCost = 1.5;
constexpr double kLargestCost = 1 / 0.15;

// Less gain than this is not worth the loss.
constexpr double kLeastGain = 1.05;
constexpr int64_t kMostChunks = 1024;
// Lengths of each chunk at which costs are compared.
constexpr int64_t kLengthsOfChunk = 8;

// On WikiText-2 and in books with the settings "recommended": how much the mean factor by which
// errors widen memory sets grows with each chunk after the second, its largest, in the eighth, and
// the keys that a block of rows recalls, as a share of its rows' matches.
constexpr double kWideningPerChunk = 0.5;
constexpr double kMostWidening = 4;
constexpr double kRecalledShare = 0.2;

// Products of the sparse attention of one head, chunk by chunk.
class SparseProducts {
 public:
  explicit SparseProducts(const PrefillConfig& config) : config_(config) {}

  // With `rows` rows of the next chunk.
  double with(int64_t rows) const {
    const auto begin = static_cast<double>(begin_), count = static_cast<double>(rows);
    const double tail = static_cast<double>(std::min(rows, config_.dense_tail));
    double all = before_ + count * (count + 1) / 2 + tail * begin;
    if (begin_ == 0) return all;
    // The errors of the second chunk are the first to be measured.
    const double chunks = begin / static_cast<double>(config_.chunk_size);
    const double grown =
        std::clamp(1 + kWideningPerChunk * (chunks - 1), 1.0,
                   std::min(kMostWidening, static_cast<double>(config_.max_widen)));
    const double widening = config_.widens() ? grown : 1.0;
    const double memory =
        static_cast<double>(config_.sink_tokens) +
        widening * static_cast<double>(config_.local_window + config_.heavy_budget);
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
  int64_t begin_ = 0;
  double before_ = 0;
};

std::string device_name(const at::Device& device) {
  if (!device.is_cpu() && !device.is_cuda()) return device.str();
  const char* const name = device.is_cpu() ? "h2o_prefill::cpu_isa" : "h2o_prefill::cuda_arch";
  const auto kernels = c10::Dispatcher::singleton().findSchema({name, ""});
  if (!kernels) return device.str();
  torch::jit::Stack stack;
  kernels->callBoxed(stack);
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

int64_t shortest_sparse_prompt(const PrefillConfig& config, double sparse_product) {
  SparseProducts products(config);
  const int64_t size = config.chunk_size, step = std::max<int64_t>(size / kLengthsOfChunk, 1);
  int64_t shortest = size;
  for (int64_t chunk = 0; chunk < kMostChunks; ++chunk) {
    for (int64_t rows = step; rows <= size; rows += step) {
      const int64_t tokens = chunk * size + rows;
      const double dense = static_cast<double>(tokens) * static_cast<double>(tokens + 1) / 2;
      const double gain = dense / (sparse_product * products.with(rows));
      if (gain < kLeastGain) shortest = tokens + step;
    }
    products.end_chunk();
  }
  return shortest > kMostChunks * size ? kLargestSetting : shortest;
}

}  // namespace h2o_prefill
