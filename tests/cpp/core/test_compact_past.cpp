// That ranges equal one call to the bit: tests/python/distributed/test_sequence.py.
#include "h2o_prefill/compact_past.h"

#include "testing.h"

namespace h2o_prefill::testing {
namespace {

TEST(CompactPast, TokensOfTheRangeFollowItsRows) {
  const auto x = random_qkv(20);
  const auto needed = at::tensor({int64_t{3}, int64_t{7}});
  CompactPast past(16, needed, x.k.index_select(2, needed), x.v.index_select(2, needed), 4);
  past.append(x.k.narrow(2, 16, 1), x.v.narrow(2, 16, 1));
  const auto [k, v] = past.append(x.k.narrow(2, 17, 3), x.v.narrow(2, 17, 3));
  const auto rows = at::cat({needed, at::arange(16, 20)});
  EXPECT_TRUE(same(k, x.k.index_select(2, rows)));
  EXPECT_TRUE(same(v, x.v.index_select(2, rows)));
  EXPECT_TRUE(same(past.table(), needed));
}

TEST(CompactPast, RefusesWhatDoesNotBelong) {
  const auto rows = at::zeros({1, 2, 1, 8});
  const auto at = [](int64_t position) { return at::full({1}, position, at::kLong); };
  EXPECT_THROW(CompactPast(16, at(16), rows, rows, 4), c10::ValueError);
  EXPECT_THROW(CompactPast(16, at(3), rows.narrow(2, 0, 0), rows, 4), c10::ValueError);
  CompactPast past(16, at(3), rows, rows, 1);
  past.append(rows, rows);
  EXPECT_THROW(past.append(rows, rows), c10::ValueError);
}

}  // namespace
}  // namespace h2o_prefill::testing
