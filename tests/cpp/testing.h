// Shared by the tests of classes: random inputs, comparison to the bit, and errors.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <string>

namespace h2o_prefill::testing {

struct Qkv {
  at::Tensor q;
  at::Tensor k;
  at::Tensor v;
};

// q and k are large enough for attention to be far from uniform.
inline Qkv random_qkv(int64_t length) {
  at::manual_seed(20 + length);
  const auto random = [&](int64_t heads, int64_t dim) {
    return at::randn({2, heads, length, dim});
  };
  return {random(4, 8) * 2, random(2, 8) * 2, random(2, /*dim=*/16)};
}

// Equal to the bit, dtype included.
inline ::testing::AssertionResult same(const at::Tensor& got, const at::Tensor& expected) {
  if (got.scalar_type() == expected.scalar_type() && at::equal(got, expected)) {
    return ::testing::AssertionSuccess();
  }
  auto failure = ::testing::AssertionFailure();
  failure << got.scalar_type() << ' ' << got.sizes() << ", expected " << expected.scalar_type()
          << ' ' << expected.sizes();
  if (got.sizes() != expected.sizes()) return failure;
  if (got.numel() <= 64) return failure << "\ngot\n" << got << "\nexpected\n" << expected;
  const auto difference = (got.to(at::kDouble) - expected.to(at::kDouble)).abs();
  return failure << ", " << difference.ne(0).sum().item<int64_t>() << " entries differ, by "
                 << difference.max().item<double>() << " at most";
}

// The message of the c10::ValueError that the call throws.
template <typename Call>
std::string message_of(Call&& call) {
  try {
    call();
  } catch (const c10::ValueError& error) {
    return error.what_without_backtrace();
  }
  return "nothing was thrown";
}

}  // namespace h2o_prefill::testing

// The call throws c10::ValueError, and this is in its message.
#define EXPECT_REFUSED(call, part)                               \
  EXPECT_PRED_FORMAT2(::testing::IsSubstring, std::string(part), \
                      ::h2o_prefill::testing::message_of([&] { static_cast<void>(call); }))
