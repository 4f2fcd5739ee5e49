#include "cuda_emulation/wgmma.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "cuda_emulation/races.h"
#include "kernels/cpu/float16.h"

namespace cuda_emulation::hopper {
namespace {

using h2o_prefill::DType;

// A signalling NaN: arithmetic on it gives another NaN.
constexpr uint32_t kUnderWay = 0x7FA0DEADU;
constexpr uint32_t kUnitBytes = 16;
constexpr uint32_t kRowBytes = 128;
constexpr int kUnitElements = 8;

// The fields of a descriptor, as the PTX ISA defines them, with the swizzle of 128 bytes: 8 rows of
// 128 bytes are one after the other, and bits 4 to 6 of an address are XORed with its bits 7 to 9.
struct Descriptor {
  const char* name;
  Site site;
  uint32_t address;
  uint32_t leading;
  uint32_t stride;

  Descriptor(const char* name, uint64_t bits, Site site) : name(name), site(site) {
    const auto field = [&](int from) { return static_cast<uint32_t>(bits >> from & 0x3FFF) << 4; };
    address = field(0);
    leading = field(16);
    stride = field(32);
    if ((bits >> 49 & 7) || bits >> 62 != 1) {
      fail_at(site, "%s with a base offset or another swizzle than 128 bytes is not emulated",
              name);
    }
  }

  // Reads the unit of 16 bytes that begins `bytes` bytes after the beginning of a row.
  void read_unit(int row, uint32_t bytes, uint16_t* unit) const {
    const uint32_t from = address + row / 8 * stride + row % 8 * kRowBytes + bytes;
    std::memcpy(unit, at_shared_address(name, from ^ (from >> 7 & 7) << 4, kUnitBytes, site),
                kUnitBytes);
  }
};

// Reads the operand that a descriptor names as [lines, 16]: K-major, 16 elements of each line are
// together; else `lines` elements of each of 16 rows are, 128 bytes, and the next ones a leading
// offset away.
std::vector<uint16_t> read_operand(const char* name, uint64_t bits, int lines, Major major,
                                   Site site) {
  const Descriptor descriptor(name, bits, site);
  std::vector<uint16_t> elements(lines * kProductDepth);
  const int width = major == Major::kRows ? lines : kProductDepth;
  for (int i = 0; i < lines * kProductDepth; i += kUnitElements) {
    const int row = i / width, first = i % width;
    const uint32_t byte = first * sizeof(uint16_t);
    uint16_t unit[kUnitElements];
    descriptor.read_unit(row, byte / kRowBytes * descriptor.leading + byte % kRowBytes, unit);
    for (int j = 0; j < kUnitElements; ++j) {
      elements[major == Major::kRows ? (first + j) * kProductDepth + row : i + j] = unit[j];
    }
  }
  return elements;
}

std::vector<uint16_t> read_a(const char* name, const Operands& operands, Site site) {
  return read_operand(name, operands.a, kProductRows, Major::kColumns, site);
}

std::vector<uint16_t> read_b(const char* name, const Operands& operands, Site site) {
  return read_operand(name, operands.b, operands.columns, operands.b_major, site);
}

// Row of the product of registers i = 0, 1 (0) and 2, 3 (1) of 4 in each 8 columns, and the first
// of two columns.
int fragment_row(int thread, int half) {
  return thread / kWarpSize * 16 + thread % kWarpSize / 4 + 8 * half;
}
int fragment_column(int thread) { return thread % 4 * 2; }

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

void WarpgroupThread::add(std::shared_ptr<Product> product, const uint32_t* a_registers, float* c,
                          bool add) {
  const int registers = product->operands.columns / 2;
  Accumulator& accumulator = accumulators_[c];
  if (accumulator.parts++ == 0) {
    accumulator.values.assign(c, c + registers);
    for (int i = 0; i < registers; ++i) c[i] = std::bit_cast<float>(kUnderWay);
  }
  Part part{std::move(product), a_registers, {}, c, add};
  if (a_registers) std::copy_n(a_registers, part.a.size(), part.a.begin());
  open_.push_back(std::move(part));
}

void WarpgroupThread::fence_operand(const uint32_t (&a)[4], Site site) {
  const Registers now = std::to_array(a);
  if (const auto before = finished_operands_.find(a); before != finished_operands_.end()) {
    if (before->second != now) {
      fail_at(
          site,
          "an operand in registers has changed between the wait for its wgmma and fence_operand");
    }
    finished_operands_.erase(before);
  }
  fenced_operands_[a] = now;
}

bool WarpgroupThread::is_operand_fenced(const uint32_t* a) const {
  const auto fenced = fenced_operands_.find(a);
  return fenced != fenced_operands_.end() &&
         std::equal(fenced->second.begin(), fenced->second.end(), a);
}

void WarpgroupThread::commit() {
  groups_.push_back(std::move(open_));
  open_.clear();
}

void WarpgroupThread::wait(int pending, int thread, Site site) {
  is_fenced = false;
  while (static_cast<int>(groups_.size()) > pending) {
    for (const Part& part : groups_.front()) finish(part, thread, site);
    const races::Unseen unseen;
    groups_.pop_front();
  }
}

void WarpgroupThread::finish(const Part& part, int thread, Site site) {
  Product& product = *part.product;
  const Operands& operands = product.operands;
  const int warp = thread / kWarpSize;
  if (product.checked_warp != warp) {
    product.checked_warp = warp;
    if ((!operands.a_registers && read_a("wgmma", operands, site) != product.a_elements) ||
        read_b("wgmma", operands, site) != product.b_elements) {
      fail_at(site, "shared memory has changed between a wgmma (%s:%d) and the wait for it",
              product.site.file, product.site.line);
    }
  }
  if (part.a_registers && !std::equal(part.a.begin(), part.a.end(), part.a_registers)) {
    fail_at(site, "an operand in registers has changed between a wgmma (%s:%d) and the wait for it",
            product.site.file, product.site.line);
  }
  if (part.a_registers) finished_operands_[part.a_registers] = part.a;
  Accumulator& accumulator = accumulators_[part.c];
  for (int i = 0; i < operands.columns / 2; ++i) {
    const int row = fragment_row(thread, i / 2 % 2);
    const int column = 8 * (i / 4) + fragment_column(thread) + i % 2;
    float& value = accumulator.values[i];
    value = static_cast<float>((part.add ? value : 0.0) +
                               product.values[row * operands.columns + column]);
  }
  if (--accumulator.parts > 0) return;
  for (int i = 0; i < operands.columns / 2; ++i) {
    if (std::bit_cast<uint32_t>(part.c[i]) != kUnderWay) {
      fail_at(site, "an accumulator has changed between a wgmma (%s:%d) and the wait for it",
              product.site.file, product.site.line);
    }
    part.c[i] = accumulator.values[i];
  }
  accumulators_.erase(part.c);
}

void issue_product(void* const* arguments) {
  const auto& first = *static_cast<const Issue*>(arguments[0]);
  const Site site = first.site;
  const Operands& operands = first.operands;
  for (int i = 0; i < kWarpgroupSize; ++i) {
    const auto& mine = *static_cast<const Issue*>(arguments[i]);
    if (mine.operands.a != operands.a || mine.operands.b != operands.b || mine.add != first.add) {
      fail_at(site, "threads of a warpgroup give %s different operands", first.name);
    }
    if (mine.thread->needs_proxy_fence) {
      fail_at(site, "%s of what was copied without fence_async_proxy", first.name);
    }
    if (!mine.thread->is_under_way(mine.c) && !mine.thread->is_fenced) {
      fail_at(site, "%s without wgmma_fence since the last wait", first.name);
    }
    if (const uint32_t* const a = mine.operands.a_registers;
        a && !mine.thread->is_operand_fenced(a)) {
      fail_at(site, "%s of registers without fence_operand since they changed", first.name);
    }
  }
  auto product = std::make_shared<Product>();
  product->operands = operands;
  product->site = site;
  if (operands.a_registers) {
    product->a_elements.resize(kProductRows * kProductDepth);
    for (int thread = 0; thread < kWarpgroupSize; ++thread) {
      const uint32_t* const a = static_cast<const Issue*>(arguments[thread])->operands.a_registers;
      for (int i = 0; i < 4; ++i) {
        uint16_t* const pair = &product->a_elements[fragment_row(thread, i % 2) * kProductDepth +
                                                    8 * (i / 2) + fragment_column(thread)];
        pair[0] = static_cast<uint16_t>(a[i]);
        pair[1] = static_cast<uint16_t>(a[i] >> 16);
      }
    }
  } else {
    product->a_elements = read_a(first.name, operands, site);
  }
  product->b_elements = read_b(first.name, operands, site);
  product->values.resize(kProductRows * operands.columns);
  multiply(to_numbers(operands.dtype, product->a_elements).data(),
           to_numbers(operands.dtype, product->b_elements).data(), operands.columns,
           product->values.data());
  for (int i = 0; i < kWarpgroupSize; ++i) {
    const auto& mine = *static_cast<const Issue*>(arguments[i]);
    mine.thread->add(product, mine.operands.a_registers, mine.c, mine.add);
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
