// Inputs of the micro-kernels: rows of numbers of any dtype, as kernels read them and as doubles.
#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "kernels/cpu/float16.h"
#include "kernels/params.h"

namespace h2o_prefill::testing {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

inline std::string name_of(DType dtype) {
  if (dtype == DType::kFloat32) return "float32";
  return dtype == DType::kBFloat16 ? "bfloat16" : "float16";
}

// Half a unit in the last place, relative; 0 for float32, whose rounding is in every tolerance.
inline double rounding(DType dtype) {
  if (dtype == DType::kFloat32) return 0.0;
  return dtype == DType::kBFloat16 ? 0x1p-8 : 0x1p-11;
}

// Bits of sign, exponent and mantissa to a number: the definition, for any IEEE-like format.
inline double decode(uint32_t bits, int exponent_bits, int mantissa_bits) {
  const uint32_t special = (1U << exponent_bits) - 1;
  const uint32_t exponent = bits >> mantissa_bits & special;
  const uint32_t mantissa = bits & ((1U << mantissa_bits) - 1);
  const double sign = bits >> (exponent_bits + mantissa_bits) ? -1.0 : 1.0;
  if (exponent == special) return mantissa ? kNan : sign * HUGE_VAL;
  const int bias = (1 << (exponent_bits - 1)) - 1;
  const double fraction = std::ldexp(mantissa, -mantissa_bits);
  return sign * (exponent ? std::ldexp(1.0 + fraction, static_cast<int>(exponent) - bias)
                          : std::ldexp(fraction, 1 - bias));
}

// [count, dim], rows `dim + gap` elements apart. Everything is NaN at first, and the gaps stay so:
// reading or writing them shows.
class Rows {
 public:
  Rows(DType dtype, int64_t count, int64_t dim, int64_t gap = 0)
      : dtype_(dtype), count_(count), dim_(dim), stride_(dim + gap) {
    bytes_.resize(count * stride_ * size_of(dtype));
    for (int64_t i = 0; i < count * stride_; ++i) set_element(i, kNan);
  }

  DType dtype() const { return dtype_; }
  int64_t count() const { return count_; }
  int64_t dim() const { return dim_; }
  int64_t stride() const { return stride_; }
  const void* data() const { return bytes_.data(); }
  void* data() { return bytes_.data(); }

  double get(int64_t row, int64_t d) const { return element(row * stride_ + d); }
  // Rounds to the dtype.
  void set(int64_t row, int64_t d, double x) { set_element(row * stride_ + d, x); }

  // [count, dim]
  std::vector<double> numbers() const {
    std::vector<double> all;
    for (int64_t row = 0; row < count_; ++row) {
      for (int64_t d = 0; d < dim_; ++d) all.push_back(get(row, d));
    }
    return all;
  }

  bool gaps_untouched() const {
    for (int64_t row = 0; row < count_; ++row) {
      for (int64_t d = dim_; d < stride_; ++d) {
        if (!std::isnan(get(row, d))) return false;
      }
    }
    return true;
  }

 private:
  double element(int64_t i) const {
    if (dtype_ == DType::kFloat32) return decode(bits<uint32_t>(i), 8, 23);
    return dtype_ == DType::kBFloat16 ? decode(bits<uint16_t>(i), 8, 7)
                                      : decode(bits<uint16_t>(i), 5, 10);
  }

  void set_element(int64_t i, double x) {
    const float rounded = static_cast<float>(x);
    const uint32_t wide = float_to_bits(rounded);
    const uint16_t narrow =
        dtype_ == DType::kBFloat16 ? float_to_bfloat16(rounded) : float_to_float16(rounded);
    if (dtype_ == DType::kFloat32) {
      std::memcpy(&bytes_[i * sizeof(wide)], &wide, sizeof(wide));
    } else {
      std::memcpy(&bytes_[i * sizeof(narrow)], &narrow, sizeof(narrow));
    }
  }

  template <typename Bits>
  Bits bits(int64_t i) const {
    Bits x;
    std::memcpy(&x, &bytes_[i * sizeof(Bits)], sizeof(Bits));
    return x;
  }

  DType dtype_;
  int64_t count_;
  int64_t dim_;
  int64_t stride_;
  std::vector<uint8_t> bytes_;
};

// Numbers that are the same everywhere, which the distributions of the standard library are not.
class Random {
 public:
  explicit Random(uint32_t seed) : engine_(seed) {}

  double uniform(double low, double high) {
    return low + (high - low) * engine_() / std::mt19937::max();
  }
  int64_t below(int64_t n) { return engine_() % n; }

  // 0 to n - 1 in some order.
  std::vector<int32_t> permutation(int64_t n) {
    std::vector<int32_t> all(n);
    std::iota(all.begin(), all.end(), 0);
    for (int64_t i = n - 1; i > 0; --i) std::swap(all[i], all[below(i + 1)]);
    return all;
  }

  // Multiples of `step`, or any number where it is 0.
  void fill(Rows& rows, double magnitude, double step = 0.0) {
    for (int64_t i = 0; i < rows.count(); ++i) {
      for (int64_t d = 0; d < rows.dim(); ++d) {
        const double x = uniform(-magnitude, magnitude);
        rows.set(i, d, step > 0.0 ? std::nearbyint(x / step) * step : x);
      }
    }
  }

 private:
  std::mt19937 engine_;
};

}  // namespace h2o_prefill::testing
