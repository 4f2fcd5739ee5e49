#include "h2o_prefill/ops.h"
#include "testing.h"

namespace h2o_prefill::testing {
namespace {

TEST(MergeStates, EqualsOneSoftmaxOverBothKeySets) {
  for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16}) {
    const auto lse_type = type == at::kDouble ? at::kDouble : at::kFloat;
    const auto x = random_qkv(30, 4, 2, type);
    const auto in_first = at::arange(30).remainder(3) == 0;
    const auto first = attend(x, in_first), second = attend(x, in_first.logical_not());
    const auto all = attend(x, at::ones({30}, at::kBool));
    const auto [out, lse] = merge_states(first.out.to(type), first.lse.to(lse_type),
                                         second.out.to(type), second.lse.to(lse_type));
    EXPECT_TRUE(close(out, all.out, std::max(1e-5, 2 * rounding_error(all.out, type))));
    EXPECT_TRUE(close(lse, all.lse));
    EXPECT_EQ(out.scalar_type(), type);
    EXPECT_EQ(lse.scalar_type(), lse_type);
  }
}

TEST(MergeStates, EmptySideContributesNothing) {
  const auto out_a = at::randn({1, 2, 5, 6}), lse_a = at::randn({1, 2, 5});
  const auto garbage = at::full({1, 2, 5, 6}, 1e30),
             empty = at::full({1, 2, 5}, -kInfinity, at::kFloat);
  for (const bool swap : {false, true}) {
    const auto [out, lse] = swap ? merge_states(garbage, empty, out_a, lse_a)
                                 : merge_states(out_a, lse_a, garbage, empty);
    EXPECT_TRUE(close(out, out_a, 1e-6));
    EXPECT_TRUE(close(lse, lse_a, 1e-6));
  }
  const auto [out, lse] = merge_states(garbage, empty, garbage, empty);
  EXPECT_TRUE(same(out, at::zeros({1, 2, 5, 6})));
  EXPECT_TRUE(same(lse, empty));
}

TEST(MergeStates, WrongArguments) {
  const auto out = at::zeros({1, 2, 5, 6}), lse = at::zeros({1, 2, 5});
  EXPECT_VALUE_ERROR_WITH(merge_states(out[0], lse, out, lse), "out_a must have 4 dimensions");
  EXPECT_VALUE_ERROR_WITH(merge_states(out, lse, out.slice(2, 0, 4), lse),
                          "out_b must have the shape of out_a");
  EXPECT_VALUE_ERROR_WITH(merge_states(out, lse.slice(2, 0, 4), out, lse),
                          "lse_a must have shape [1, 2, 5]");
  EXPECT_VALUE_ERROR_WITH(merge_states(out, lse, out, lse.to(at::kDouble)),
                          "lse_b must be float32, got float64");
}

}  // namespace
}  // namespace h2o_prefill::testing
