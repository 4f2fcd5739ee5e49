#include "h2o_prefill/ops.h"
#include "testing.h"

namespace h2o_prefill::testing {
namespace {

// More than two steps of the CPU kernel, 1024 keys each.
constexpr int64_t kHistory = 2500;

TEST(DenseAttention, LongHistoryEqualsMaskedSoftmax) {
  for (const auto& [type, tolerance] :
       {std::pair{at::kFloat, 1e-5}, std::pair{at::kDouble, 1e-5}, std::pair{at::kHalf, 3e-3},
        std::pair{at::kBFloat16, 2e-2}}) {
    const auto x = random_qkv(kHistory, 3, 1, type, 1);
    for (const int64_t rows : {1, 13, 1100}) {
      const auto call = x.call(kHistory - rows, kHistory);
      const auto out = dense_attention(call.q, call.k, call.v);
      EXPECT_TRUE(close(out, attend_causally(call).out, tolerance)) << rows << " rows of " << type;
      EXPECT_EQ(out.scalar_type(), type);
    }
  }
}

TEST(DenseAttention, CallsEqualMaskedSoftmax) {
  const auto x = random_qkv(100);
  for (const int64_t rows : {1, 70, 100}) {
    auto call = x.call(100 - rows, 100);
    const auto out = dense_attention(call.q, call.k, call.v, 0.5);
    EXPECT_TRUE(out.transpose(1, 2).is_contiguous());
    call.q = call.q * (0.5 * std::sqrt(8.0));
    EXPECT_TRUE(close(out, attend_causally(call).out)) << rows << " rows";
  }
}

// On CUDA, few rows of one prompt see many keys in parts. A history whose parts leave some over.
TEST(DenseAttention, SinksAndSoftcapOfFewRows) {
  const auto x = random_qkv(1100, 3, 1, at::kFloat, 1);
  const auto sinks = at::arange(3, at::kFloat);
  for (const int64_t rows : {1, 13}) {
    const auto call = x.call(1100 - rows, 1100);
    EXPECT_TRUE(close(dense_attention(call.q, call.k, call.v), attend_causally(call).out));
    for (const auto& [scale, softcap] : {std::pair{0.7, 2.0}, {0.0, 2.0}, {1e-30, 1e300}}) {
      const auto out = dense_attention(call.q, call.k, call.v, scale, sinks, softcap);
      EXPECT_TRUE(close(out, dense_attention(call.q.to(at::kDouble), call.k.to(at::kDouble),
                                             call.v.to(at::kDouble), scale, sinks, softcap)))
          << "scale " << scale;
      EXPECT_TRUE(out.transpose(1, 2).is_contiguous());
    }
  }
}

TEST(DenseAttention, WithoutRows) {
  const auto call = random_qkv(100).call(100, 100);
  EXPECT_EQ(dense_attention(call.q, call.k, call.v).sizes(), at::IntArrayRef({2, 4, 0, kValueDim}));
}

}  // namespace
}  // namespace h2o_prefill::testing
