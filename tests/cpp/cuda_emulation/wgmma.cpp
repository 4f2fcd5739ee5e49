#include "cuda_emulation/wgmma.h"

#include <bit>
#include <cstring>

#include "kernels/cpu/float16.h"

namespace cuda_emulation::hopper {
namespace {

using h2o_prefill::DType;

// A signalling NaN: what is computed from it is another NaN.
constexpr uint32_t kUnderWay = 0x7FA0DEADU;
constexpr size_t kUnitBytes = 16;

// Reads the units [rows, 2] that a descriptor of a K-major operand names, as the PTX ISA defines
// it: 8 rows of 16, 32, 64 or 128 bytes are one behind the other, and each address is XORed with
// itself.
std::vector<uint16_t> read_operand(const char* name, uint64_t descriptor, int rows, Site site) {
  const auto field = [&](int from) {
    return static_cast<uint32_t>(descriptor >> from & 0x3FFF) << 4;
  };
  const uint32_t address = field(0), leading = field(16), stride = field(32);
  if (descriptor >> 49 & 7) fail("%s with a base offset (%s:%d)", name, site.file, site.line);
  constexpr int kSwizzledBits[] = {0, 3, 2, 1};
  const int bits = kSwizzledBits[descriptor >> 62];
  const uint32_t pitch = 16U << bits;
  std::vector<uint16_t> elements(rows * kProductDepth);
  for (int row = 0; row < rows; ++row) {
    for (uint32_t unit = 0; unit < 2; ++unit) {
      uint32_t from = address + row / 8 * stride + row % 8 * pitch;
      from += unit * (bits == 0 ? leading : static_cast<uint32_t>(kUnitBytes));
      from ^= (from >> 7 & ((1U << bits) - 1)) << 4;
      std::memcpy(&elements[row * kProductDepth + unit * 8],
                  at_shared_address(name, from, kUnitBytes, site), kUnitBytes);
    }
  }
  return elements;
}

std::vector<double> to_numbers(DType dtype, const std::vector<uint16_t>& elements) {
  std::vector<double> numbers;
  for (const uint16_t x : elements) {
    numbers.push_back(dtype == DType::kBFloat16 ? h2o_prefill::bfloat16_to_float(x)
                                                : h2o_prefill::float16_to_float(x));
  }
  return numbers;
}

// values = a b, exactly but for roundings of double. Not instrumented: the tests spend their time
// here.
__attribute__((no_sanitize("address", "undefined"))) void multiply(const double* a, const double* b,
                                                                   int columns, double* values) {
  for (int row = 0; row < kProductRows; ++row) {
    for (int column = 0; column < columns; ++column) {
      double sum = 0.0;
      for (int k = 0; k < kProductDepth; ++k) {
        sum += a[row * kProductDepth + k] * b[column * kProductDepth + k];
      }
      values[row * columns + column] = sum;
    }
  }
}

}  // namespace

void WarpgroupThread::add(std::shared_ptr<Product> product, float* c, bool add) {
  const int registers = product->columns / 2;
  Accumulator& accumulator = accumulators_[c];
  if (accumulator.parts++ == 0) {
    accumulator.values.assign(c, c + registers);
    for (int i = 0; i < registers; ++i) c[i] = std::bit_cast<float>(kUnderWay);
  }
  open_.push_back({std::move(product), c, add});
}

void WarpgroupThread::commit() {
  groups_.push_back(std::move(open_));
  open_.clear();
}

void WarpgroupThread::wait(int pending, int thread, Site site) {
  is_fenced = false;
  for (; static_cast<int>(groups_.size()) > pending; groups_.pop_front()) {
    for (const Part& part : groups_.front()) finish(part, thread, site);
  }
}

void WarpgroupThread::finish(const Part& part, int thread, Site site) {
  Product& product = *part.product;
  const int warp = thread / kWarpSize;
  const int lane = thread % kWarpSize;
  if (product.checked_warp != warp) {
    product.checked_warp = warp;
    if (read_operand("wgmma", product.a, kProductRows, site) != product.a_elements ||
        read_operand("wgmma", product.b, product.columns, site) != product.b_elements) {
      fail("shared memory has changed between a wgmma (%s:%d) and the wait for it (%s:%d)",
           product.site.file, product.site.line, site.file, site.line);
    }
  }
  Accumulator& accumulator = accumulators_[part.c];
  for (int i = 0; i < product.columns / 2; ++i) {
    const int row = 16 * warp + (lane >> 2) + ((i & 2) ? 8 : 0);
    const int column = 8 * (i >> 2) + 2 * (lane & 3) + (i & 1);
    float& value = accumulator.values[i];
    value = static_cast<float>((part.add ? value : 0.0) +
                               product.values[row * product.columns + column]);
  }
  if (--accumulator.parts > 0) return;
  for (int i = 0; i < product.columns / 2; ++i) {
    if (std::bit_cast<uint32_t>(part.c[i]) != kUnderWay) {
      fail("an accumulator has changed between a wgmma (%s:%d) and the wait for it (%s:%d)",
           product.site.file, product.site.line, site.file, site.line);
    }
    part.c[i] = accumulator.values[i];
  }
  accumulators_.erase(part.c);
}

void issue_product(void* const* arguments) {
  const auto& first = *static_cast<const Issue*>(arguments[0]);
  const Site site = first.site;
  for (int i = 0; i < kWarpgroupSize; ++i) {
    const auto& mine = *static_cast<const Issue*>(arguments[i]);
    if (mine.a != first.a || mine.b != first.b || mine.add != first.add) {
      fail("threads of a warpgroup give %s different operands (%s:%d)", first.name, site.file,
           site.line);
    }
    if (mine.thread->needs_proxy_fence) {
      fail("%s of what was copied without fence_async_proxy (%s:%d)", first.name, site.file,
           site.line);
    }
    if (!mine.thread->is_under_way(mine.c) && !mine.thread->is_fenced) {
      fail("%s without wgmma_fence since the last wait (%s:%d)", first.name, site.file, site.line);
    }
  }
  auto product = std::make_shared<Product>();
  product->dtype = first.dtype;
  product->columns = first.columns;
  product->a = first.a;
  product->b = first.b;
  product->site = site;
  product->a_elements = read_operand(first.name, first.a, kProductRows, site);
  product->b_elements = read_operand(first.name, first.b, first.columns, site);
  product->values.resize(kProductRows * first.columns);
  multiply(to_numbers(first.dtype, product->a_elements).data(),
           to_numbers(first.dtype, product->b_elements).data(), first.columns,
           product->values.data());
  for (int i = 0; i < kWarpgroupSize; ++i) {
    const auto& mine = *static_cast<const Issue*>(arguments[i]);
    mine.thread->add(product, mine.c, mine.add);
  }
}

void wait_for_products(void* const* arguments) {
  const int first = thread_index() / kWarpSize * kWarpSize % kWarpgroupSize;
  for (int lane = 0; lane < kWarpSize; ++lane) {
    const auto& mine = *static_cast<const Wait*>(arguments[lane]);
    mine.thread->wait(mine.pending, first + lane, mine.site);
  }
}

}  // namespace cuda_emulation::hopper
