#include "kernels/cpu/bfloat16_probe.h"

#include <algorithm>
#include <chrono>
#include <limits>

namespace h2o_prefill {
namespace {

// One head of a usual size; 2 million multiply-adds, 20 to 40 microseconds with AVX-512.
constexpr int64_t kRows = 64;
constexpr int64_t kKeys = 256;
constexpr int64_t kDim = 64;

// The least of some, since other processes only ever add to a time.
constexpr int kRepeats = 5;

// Rounding P to bfloat16 costs accuracy: it must pay.
constexpr double kGain = 1.15;

double seconds(const CpuKernels& kernels) {
  const std::vector<uint16_t> ones(kKeys * kDim, 0x3F80);
  std::vector<uint16_t> out(kRows * kDim);
  std::vector<float> lse(kRows);
  std::vector<float> keys(kernels.packed_key_floats(kKeys, kDim, DType::kBFloat16));
  std::vector<float> values(kernels.packed_value_floats(kKeys, kDim, DType::kBFloat16));
  std::vector<float> scratch(kernels.scratch_floats(kDim, kDim, kKeys));
  PackArgs pack{ones.data(), DType::kBFloat16, kDim, nullptr, kKeys, 0, kKeys, kDim, keys.data()};
  kernels.pack_keys(pack);
  pack.packed = values.data();
  kernels.pack_values(pack);
  const KeySet set{keys.data(), values.data(), kKeys, nullptr, nullptr};
  AttendRowsArgs args{};
  args.query = ones.data();
  args.out = out.data();
  args.lse = lse.data();
  args.dtype = args.out_dtype = DType::kBFloat16;
  args.query_stride = args.out_stride = args.head_dim = args.value_dim = kDim;
  args.rows = kRows;
  args.scale = 1.0F;
  args.sets = &set;
  args.num_sets = 1;
  args.gemm = kernels.gemm;
  args.scratch = scratch.data();
  double least = std::numeric_limits<double>::infinity();
  for (int i = 0; i <= kRepeats; ++i) {
    const auto start = std::chrono::steady_clock::now();
    kernels.attend_rows(args);
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    if (i) least = std::min(least, took.count());  // the first one only warms up
  }
  if (kernels.gemm_release) kernels.gemm_release();
  return least;
}

}  // namespace

CpuKernels fastest_in_bfloat16(const CpuKernels& without,
                               const std::vector<CpuKernels>& with_products) {
  if (with_products.empty()) return without;
  CpuKernels fastest = without;
  double limit = seconds(without) / kGain;
  for (const CpuKernels& kernels : with_products) {
    const double took = seconds(kernels);
    if (took < limit) {
      fastest = kernels;
      limit = took;
    }
  }
  return fastest;
}

}  // namespace h2o_prefill
