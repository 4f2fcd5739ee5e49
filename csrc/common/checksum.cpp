#include "common/checksum.h"

#include <ATen/Parallel.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

namespace h2o_prefill {
namespace {

constexpr size_t kLanes = 8;
constexpr size_t kPiece = size_t{1} << 20;
using Lanes = std::array<uint64_t, kLanes>;

uint64_t mix(uint64_t hash, uint64_t word) {
  const uint64_t x = (hash ^ word) * 0x9E3779B97F4A7C15U;
  return x ^ (x >> 32U);
}

void add(Lanes& lanes, const void* words) {
  Lanes taken;
  std::memcpy(taken.data(), words, sizeof taken);
  for (size_t i = 0; i < kLanes; ++i) lanes[i] = mix(lanes[i], taken[i]);
}

Lanes lanes_of(const char* data, size_t bytes) {
  Lanes lanes{};
  size_t begin = 0;
  for (; bytes - begin >= sizeof lanes; begin += sizeof lanes) add(lanes, data + begin);
  if (begin < bytes) {
    Lanes rest{};
    std::memcpy(rest.data(), data + begin, bytes - begin);
    add(lanes, rest.data());
  }
  return lanes;
}

}  // namespace

uint64_t checksum(const void* data, size_t bytes) {
  const char* const first = static_cast<const char*>(data);
  std::vector<Lanes> pieces((bytes + kPiece - 1) / kPiece);
  at::parallel_for(0, std::ssize(pieces), 1, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const size_t at = static_cast<size_t>(i) * kPiece;
      pieces[i] = lanes_of(first + at, std::min(kPiece, bytes - at));
    }
  });
  uint64_t hash = bytes;
  for (const Lanes& lanes : pieces) {
    for (const uint64_t lane : lanes) hash = mix(hash, lane);
  }
  return hash;
}

uint64_t checksum(const at::Tensor& t) {
  TORCH_CHECK_VALUE(t.defined() && t.layout() == at::kStrided && !t.is_meta(),
                    "x must be a strided tensor with elements in memory");
  const auto here = t.detach().cpu().contiguous();
  return checksum(here.const_data_ptr(), here.nbytes());
}

uint64_t combined_checksum(uint64_t first, uint64_t second) { return mix(first, second); }

}  // namespace h2o_prefill
