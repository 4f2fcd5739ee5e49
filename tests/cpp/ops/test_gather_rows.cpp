#include "h2o_prefill/ops.h"
#include "testing.h"

namespace h2o_prefill::testing {
namespace {

TEST(GatherRows, CopiesRowsOfEveryHead) {
  for (const auto type : {at::kFloat, at::kDouble, at::kBFloat16, at::kHalf}) {
    const auto x = at::randn({2, 3, 10, 5}, at::kDouble).to(type);
    const auto indices = at::randint(-1, 10, {2, 3, 7}, at::kInt);
    const auto got = gather_rows(x, indices);
    ASSERT_EQ(got.sizes(), at::IntArrayRef({2, 3, 7, 5}));
    EXPECT_EQ(got.scalar_type(), type);
    for (int64_t b = 0; b < 2; ++b) {
      for (int64_t h = 0; h < 3; ++h) {
        for (int64_t j = 0; j < 7; ++j) {
          const auto row = indices[b][h][j].item<int64_t>();
          EXPECT_TRUE(same(got[b][h][j], row < 0 ? at::zeros({5}, x.options()) : x[b][h][row]));
        }
      }
    }
  }
}

TEST(GatherRows, ReadsAnyStrides) {
  const auto x = at::randn({1, 2, 6, 4});
  const auto indices = positions({5, 0, 3}, 1, 2);
  const auto expected = gather_rows(x, indices);
  EXPECT_TRUE(same(gather_rows(by_token(x), indices), expected));
  EXPECT_TRUE(same(gather_rows(by_dim(x), indices), expected));
}

TEST(GatherRows, NothingToGather) {
  EXPECT_EQ(gather_rows(at::randn({1, 2, 6, 4}), at::empty({1, 2, 0}, at::kInt)).sizes(),
            at::IntArrayRef({1, 2, 0, 4}));
  EXPECT_TRUE(
      same(gather_rows(at::randn({1, 2, 0, 4}), positions({-1}, 1, 2)), at::zeros({1, 2, 1, 4})));
}

TEST(GatherRows, WrongArguments) {
  const auto x = at::randn({1, 2, 6, 4});
  EXPECT_VALUE_ERROR_WITH(gather_rows(x[0], positions({1}, 1, 2)), "x must have 4 dimensions");
  EXPECT_VALUE_ERROR_WITH(gather_rows(x, positions({1}, 1, 3)), "indices must have the KV heads");
  EXPECT_VALUE_ERROR_WITH(gather_rows(x, positions({1}, 1, 2).to(at::kLong)),
                          "indices must be int32, got int64");
}

}  // namespace
}  // namespace h2o_prefill::testing
