// The time of a query-key product in sparse attention, in products of the fastest dense attention
// of a device: of this library on CPUs, of PyTorch on GPUs. `benchmarks/layer.py crossover`
// measures a device and prints its row.
#pragma once

#include <string_view>

namespace h2o_prefill {

struct CostRow {
  std::string_view device;  // cpu_isa(), or the architecture of the CUDA kernels
  bool is_16_bit;
  double sparse_product;
};

// x86: 9/3 heads of 64 and 32/8 heads of 128; the float32 kernels of avx512, avx512_bf16 and amx
// are the same. sm_90a: an H200 beside cuDNN, 8,192 to 131,072 tokens.
inline constexpr CostRow kDeviceCosts[] = {
    {"avx2", false, 1.05},  {"avx2", true, 1.05},         {"avx512", false, 1.10},
    {"avx512", true, 1.10}, {"avx512_bf16", false, 1.10}, {"avx512_bf16", true, 0.95},
    {"amx", false, 1.10},   {"sm_90a", true, 4.0},
};

// Of devices that nobody has measured: CPUs, whose kernels have the same source, and others.
inline constexpr double kLargestCpuCost = 1.5;
inline constexpr double kLargestCost = 1 / 0.15;

}  // namespace h2o_prefill
