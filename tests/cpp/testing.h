// Shared by the tests of ops and classes: random inputs, and attention in plain ATen calls and
// float64, over all keys at once with a mask, so that a mistake in gathering, blocking or merging
// cannot be in both.
#pragma once

#include <ATen/ATen.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

namespace h2o_prefill::testing {

// Not the head dim.
constexpr int64_t kValueDim = 16;
constexpr double kInfinity = std::numeric_limits<double>::infinity();

struct Qkv {
  at::Tensor q;
  at::Tensor k;
  at::Tensor v;

  // Queries [begin, end), and the history up to end.
  Qkv call(int64_t begin, int64_t end) const {
    return {q.slice(2, begin, end), k.slice(2, 0, end), v.slice(2, 0, end)};
  }

  // Queries, keys and values of [begin, end) alone.
  Qkv tokens(int64_t begin, int64_t end) const {
    return {q.slice(2, begin, end), k.slice(2, begin, end), v.slice(2, begin, end)};
  }
};

// q and k are large enough for attention to be far from uniform.
inline Qkv random_qkv(int64_t length, int64_t heads = 4, int64_t kv_heads = 2,
                      at::ScalarType type = at::kFloat, int64_t batch = 2) {
  at::manual_seed(20 + length);
  const auto random = [&](int64_t h, int64_t dim) {
    return at::randn({batch, h, length, dim}, at::kDouble).to(type);
  };
  return {random(heads, 8) * 2, random(kv_heads, 8) * 2, random(kv_heads, kValueDim)};
}

// Of a memory set.
struct Budgets {
  int64_t local_window = 0;
  int64_t heavy_budget = 0;
  int64_t sink_tokens = 0;
};

struct Attention {
  at::Tensor out;     // [B, Hq, Tq, Dv]
  at::Tensor lse;     // [B, Hq, Tq]
  at::Tensor colsum;  // [B, Hkv, T]
};

// One softmax per query over the keys that `mask`, bool and broadcastable to [B, Hkv, Tq, T], lets
// it see.
inline Attention attend(const Qkv& x, const at::Tensor& mask) {
  const int64_t batch = x.q.size(0), kv_heads = x.k.size(1), group = x.q.size(1) / kv_heads;
  const int64_t rows = x.q.size(2), keys = x.k.size(2);
  const auto visible = mask.expand({batch, kv_heads, rows, keys}).unsqueeze(2);
  const auto q = x.q.to(at::kDouble).reshape({batch, kv_heads, group, rows, x.q.size(3)});
  const auto logits =
      at::einsum("bhgqd,bhkd->bhgqk", {q, x.k.to(at::kDouble)}) / std::sqrt(x.q.size(3));
  const auto masked = logits.masked_fill(visible.logical_not(), -kInfinity);
  const auto weights = at::softmax(masked, -1).nan_to_num(0.0);
  return {at::einsum("bhgqk,bhkd->bhgqd", {weights, x.v.to(at::kDouble)}).flatten(1, 2),
          at::logsumexp(masked, -1).flatten(1, 2), weights.sum({2, 3})};
}

// Query i of the last `rows` positions sees every key before it: [rows, keys].
inline at::Tensor causal_mask(int64_t rows, int64_t keys) {
  return at::ones({rows, keys}, at::kBool).tril(keys - rows);
}

inline Attention attend_causally(const Qkv& x) {
  return attend(x, causal_mask(x.q.size(2), x.k.size(2)));
}

// Query and key in the same chunk, key not after the query.
inline at::Tensor chunk_mask(int64_t length, int64_t chunk_size) {
  const auto chunk = at::floor_divide(at::arange(length), chunk_size);
  return causal_mask(length, length).logical_and(chunk.unsqueeze(1) == chunk.unsqueeze(0));
}

// Positions [B, H, M], -1 where absent -> bool [B, H, length].
inline at::Tensor membership(const at::Tensor& indices, int64_t length) {
  const auto extra = at::where(indices.lt(0), length, indices.to(at::kLong));
  auto member = at::zeros({indices.size(0), indices.size(1), length + 1}, at::kBool);
  return member.scatter_(2, extra, true).narrow(2, 0, length);
}

inline at::Tensor positions(const std::vector<int32_t>& values, int64_t batch = 1,
                            int64_t heads = 1) {
  return at::tensor(values, at::kInt)
      .expand({batch, heads, static_cast<int64_t>(values.size())})
      .contiguous();
}

// Same shape, and no further apart than `tolerance` anywhere; infinities must agree.
inline ::testing::AssertionResult close(const at::Tensor& got, const at::Tensor& expected,
                                        double tolerance = 1e-5) {
  if (got.sizes() != expected.sizes()) {
    return ::testing::AssertionFailure()
           << "shape " << got.sizes() << ", expected " << expected.sizes();
  }
  const auto a = got.to(at::kDouble), b = expected.to(at::kDouble);
  if (at::allclose(a, b, /*rtol=*/0, tolerance)) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure()
         << "largest difference " << (a - b).abs().max().item<double>() << ", tolerance "
         << tolerance;
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

// The same values with the tokens outermost, as models have them, or with the head dim outermost.
inline at::Tensor by_token(const at::Tensor& x) {
  return x.transpose(1, 2).contiguous().transpose(1, 2);
}
inline at::Tensor by_dim(const at::Tensor& x) {
  return x.transpose(2, 3).contiguous().transpose(2, 3);
}

// How far rounding to a dtype takes the values, at most.
inline double rounding_error(const at::Tensor& x, at::ScalarType type) {
  return (x.to(type).to(at::kDouble) - x).abs().max().item<double>();
}

// The message of the error that the call throws, which must be an `Error`.
template <typename Error, typename Call>
std::string message_of(Call&& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what_without_backtrace();
  } catch (const std::exception& error) {
    return std::string("another error: ") + error.what();
  }
  return "no error";
}

}  // namespace h2o_prefill::testing

// The call throws c10::ValueError with exactly this message.
#define EXPECT_VALUE_ERROR(call, message) \
  EXPECT_EQ(::h2o_prefill::testing::message_of<c10::ValueError>([&] { (void)(call); }), message)

// The call throws c10::ValueError, and this is in its message.
#define EXPECT_VALUE_ERROR_WITH(call, part)                                                        \
  EXPECT_NE(::h2o_prefill::testing::message_of<c10::ValueError>([&] { (void)(call); }).find(part), \
            std::string::npos)                                                                     \
      << "the message was: "                                                                       \
      << ::h2o_prefill::testing::message_of<c10::ValueError>([&] { (void)(call); })
