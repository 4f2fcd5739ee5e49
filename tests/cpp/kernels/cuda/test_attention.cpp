// The forward and column-sum kernels on the emulation against attention in float64: for every GPU,
// and for sm_90a. The emulation has so few multiprocessors that a block for sm_90a takes several
// tiles of rows.
#include <gtest/gtest.h>

#include <ostream>

#include "cuda_emulation/counters.h"
#include "kernels/cuda/attend_forward_sm90.h"
#include "kernels/cuda/attention_calls.h"
#include "kernels/cuda/column_sums_sm90.h"

namespace h2o_prefill::testing {

void PrintTo(const Kernels& kernels, std::ostream* out) { *out << kernels.name; }

namespace {

const Kernels kSm80{"sm80",
                    launch_attend_forward,
                    launch_column_sums,
                    divide_column_sums,
                    cuda_emulation::kMaxSharedBytes,
                    {DType::kBFloat16, DType::kFloat16, DType::kFloat32},
                    {DType::kBFloat16, DType::kFloat32},
                    {8, 64, 80, 96, 128, 256},
                    {1, 63, 64, 65, 200},
                    {0.0, 1.5}};
const Kernels kSm90{"sm90a",
                    launch_attend_forward_sm90,
                    launch_column_sums_sm90,
                    divide_column_sums_sm90,
                    cuda_emulation::kMaxSharedBytesOfHopper,
                    {DType::kBFloat16, DType::kFloat16},
                    {DType::kBFloat16},
                    {8, 56, 104, 128},
                    {1, 128, 129, 300},
                    {0.0}};

void use(const Kernels& kernels) {
  tested = &kernels;
  cuda_emulation::max_shared_bytes = kernels.shared_bytes;
}

class Attention : public ::testing::TestWithParam<Kernels> {
 protected:
  void SetUp() override { use(kernels); }

  const Kernels& kernels = GetParam();
};

INSTANTIATE_TEST_SUITE_P(Kernels, Attention, ::testing::Values(kSm80, kSm90));

TEST_P(Attention, RowsAroundTheTile) {
  for (const DType dtype : kernels.dtypes) {
    for (const int64_t rows : {1, 63, 64, 65, 129, 260}) {
      check_causal({dtype, rows, rows}, rows);
      check_causal({dtype, rows, rows + 37}, 0);
    }
  }
}

TEST_P(Attention, Dims) {
  for (const DType dtype : kernels.dtypes) {
    for (size_t i = 0; i < kernels.dims.size(); ++i) {
      const int64_t dim = kernels.dims[i], next = kernels.dims[(i + 1) % kernels.dims.size()];
      check_causal({dtype, 70, 70, dim, dim}, 70);
      check_causal({dtype, 150, 170, dim, next}, 150);
    }
  }
}

TEST_P(Attention, Chunks) {
  for (const DType dtype : kernels.few_dtypes) {
    for (const int64_t chunk_size : {1, 30}) check_causal({dtype, 150, 195}, chunk_size);
    check_causal({dtype, 290, 335}, 130);
  }
}

// Shorter than the tiles of rows and of keys, at their edges, and longer than the history.
TEST_P(Attention, Windows) {
  for (const DType dtype : kernels.few_dtypes) {
    for (const int64_t window : {1, 64, 100, 1000}) {
      for (const int64_t past : {0, 145}) {
        Call call({dtype, 150, 150 + past, 64, 64, 2});
        call.params.causal.window = window;
        call.run();
        call.expect_close(attend(call.in, [&](int64_t, int64_t, int64_t t) {
          return range(std::max<int64_t>(0, past + t + 1 - window), past + t + 1);
        }));
      }
    }
  }
}

TEST_P(Attention, GroupsBatchesAndTransposedViews) {
  for (const DType dtype : kernels.few_dtypes) {
    for (const int64_t group : {1, 3}) {
      // One of three rows counts nothing in the sums.
      check_causal({dtype, 66, 66, 64, 64, 2 * group, 2, 2}, 40,
                   {.reduce_max = true, .skip_every = 3});
      check_causal({dtype, 66, 80, 64, 56, 2 * group, 2, 2, /*transposed=*/true}, 40);
      check_causal({dtype, 66, 80, 64, 56, 2 * group, 2, 2, /*transposed=*/true}, 0);
    }
  }
}

TEST_P(Attention, SinksAndSoftcaps) {
  for (const DType dtype : kernels.few_dtypes) {
    for (const double softcap : kernels.softcaps) {
      const AttentionShape shape{
          .dtype = dtype, .rows = 70, .keys = 140, .heads = 2, .softcap = softcap, .sinks = true};
      check_causal(shape, 50);
      check_gathered(shape, 70, 50, {.scatter_add = true});
      RecallCalls({shape, 70, 35, 30, 70, 50}).check();
      RecallCalls({shape, 70, 70, 30, 70, 0}).check();
    }
  }
}

// Rows that see the first keys, each as many as a list says.
TEST_P(Attention, RowsWithLimits) {
  for (const DType dtype : kernels.few_dtypes) {
    for (const int64_t dim : {int64_t{64}, kernels.dims.back()}) {
      Call call({dtype, 150, 310, dim, 56, 2, 1, 2, /*transposed=*/true});
      std::vector<int32_t> limits;
      for (int32_t t = 0; t < 150; ++t) limits.push_back(1 + 2 * t + t % 3);
      limits.resize(2 * kLimitRows, limits.back());
      // Of the other batch row, which has the keys from 120 on.
      for (int32_t t = 0; t < 2 * kLimitRows; ++t) limits.push_back(std::max(limits[t] - 120, 0));
      call.params.rows.past = 0;
      call.params.limits = limits.data();
      for (const int stride : {0, 2 * static_cast<int>(kLimitRows)}) {
        call.params.limits_stride = stride;
        call.run();
        call.expect_close(attend(call.in, [&](int64_t b, int64_t, int64_t t) {
          return range(0, limits[b * stride + t]);
        }));
      }
    }
  }
}

TEST_P(Attention, MemorySets) {
  const SumsOptions scattered{.scatter_add = true};
  for (const DType dtype : kernels.few_dtypes) {
    for (const int64_t width : kernels.widths) {
      check_gathered({dtype, 40, 320}, width, width);
      check_gathered({dtype, 40, 320}, width, width / 2, scattered);
    }
    check_gathered({dtype, 20, 50}, 0, 0);
    check_gathered({dtype, 20, 50}, 70, 0, scattered);
    check_gathered({dtype, 130, 300, 128, 128}, 150, 131, scattered);
    check_gathered({dtype, 130, 300, 64, 64, 2}, 290, 131,
                   {.scatter_add = true, .usual_width = 70});
    check_gathered({dtype, 70, 100, kernels.dims.back(), 56}, 50, 41);
    for (const int64_t group : {1, 3, 4}) {
      check_gathered({dtype, 70, 90, 64, 64, 2 * group, 2, 2, group != 3}, 80, 67,
                     {.scatter_add = group == 3, .reduce_max = group != 1});
    }
    check_gathered({dtype, 130, 90, 64, 64, 4}, 80, 80, {.scatter_add = true, .reduce_max = true});
    // Groups of more heads than a tile takes rows of.
    for (const int64_t heads : {512, 513}) check_gathered({dtype, 1, 9, 8, 8, heads, 1}, 8, 5);
  }
}

TEST_P(Attention, RecalledKeys) {
  const int64_t widest = kernels.dims.back();
  for (const DType dtype : kernels.few_dtypes) {
    for (const RecallCase& x :
         {RecallCase{{dtype, 200, 300}, 64, 64, 100, 70, 50},
          RecallCase{{dtype, 150, 250, 64, 56, 4, 2, 2, true}, 60, 20, 30, 40, 40},
          RecallCase{{dtype, 150, 250, 128, 128, 3, 1}, 150, 1, 3, 140, 133},
          RecallCase{{dtype, 100, 400, 128, 72, 7, 1}, 96, 32, 300, 70, 50},
          RecallCase{{dtype, 150, 220, widest, 64}, 150, 150, 200, 70, 0},
          RecallCase{{dtype, 70, 170, 128, 128, 2, 1}, 70, 35, 150, 0, 0}}) {
      RecallCalls(x).check();
    }
  }
}

// Results are equal to the bit.
TEST_P(Attention, OrderOfThreadsDoesNotMatter) {
  for (const DType dtype : kernels.few_dtypes) {
    const RecallCalls calls({{dtype, 150, 300, 128, 104, 2, 1}, 50, 50, 80, 140, 133});
    const std::vector<int32_t> sets = memory_sets(1, 140, 133, 250);
    Call causal({dtype, 300, 300}), gathered({dtype, 150, 250, 128, 64, 3});
    causal.attend_causally(300);
    gathered.attend_to(sets, 140);
    for (Call* call : {&causal, &gathered}) call->run();
    const auto run = [&](uint64_t seed) {
      cuda_emulation::set_seed(seed);
      const Call call = calls.run();
      std::vector<std::vector<float>> results{call.lse, call.memory_lse};
      for (const Call* each : {&causal, &gathered}) {
        for (const bool partial : {false, true}) {
          results.push_back(sum_columns(sums_params(*each, {}), each->lse, partial));
        }
      }
      return std::pair(call.out.numbers(), results);
    };
    const auto first = run(0);
    for (const uint64_t seed : {1, 2}) EXPECT_EQ(run(seed), first);
  }
}

// Positions that a caller should not have listed are absent, and nothing is read there.
TEST_P(Attention, PositionsOutsideOfTheHistoryAreAbsent) {
  for (const DType dtype : kernels.dtypes) {
    const auto run = [&](const std::vector<int32_t>& set, const std::vector<int32_t>& offsets,
                         const std::vector<int32_t>& recalled) {
      Call call({dtype, 40, 90});
      call.attend_to(set, static_cast<int64_t>(set.size()));
      const std::vector<int32_t> visible_from(recalled.size(), 0);
      call.params.recall = {.offsets = offsets.data(),
                            .positions = recalled.data(),
                            .visible_from = visible_from.data(),
                            .entries = static_cast<int64_t>(recalled.size()),
                            .block = 40,
                            .blocks = 1};
      call.run();
      std::vector<std::vector<float>> sums;
      for (const bool scatter_add : {false, true}) {
        sums.push_back(sum_columns(sums_params(call, {.scatter_add = scatter_add}),
                                   std::vector<float>(40, 1.0F), /*partial=*/false));
      }
      return std::pair(call.out.numbers(), sums);
    };
    const auto expected = run({3, 40, -1, -1}, {0, 1}, {7});
    for (const int32_t far : {90, -5, -2000000000, 2147483647}) {
      EXPECT_EQ(run({3, 40, far, far}, {0, 2}, {7, far}), expected) << far;
    }
    EXPECT_EQ(run({3, 40, -1, -1}, {-3, 1000000}, {7}), expected);
    // Offsets that fall leave no entry; a negative number of tiles would be waited for.
    const std::vector<int32_t> many(300, 7);
    EXPECT_EQ(run({3, 40, -1, -1}, {300, 0}, many), run({3, 40, -1, -1}, {0, 0}, many));
  }
}

// More tiles of keys, and of queries, than twice the rings have buffers: an odd number
// and an even one.
TEST(AttentionSm90, RingsGoRound) {
  use(kSm90);
  check_causal({DType::kBFloat16, 130, 620, 128, 128, 3}, 0);
  check_causal({DType::kFloat16, 10, 700, 64, 64, 5}, 0);
  for (const int64_t heads : {3, 4}) {
    check_causal({DType::kFloat16, 300, 300, 128, 64, heads}, 300);
    check_gathered({DType::kBFloat16, 300, 140, 64, 64, heads}, 130, 129);
    check_gathered({DType::kBFloat16, 300, 140, 64, 64, heads}, 130, 0);  // no keys for any row
  }
}

// Units of rows lie where the lanes that load a matrix together touch different banks.
TEST(AttentionSm80, LoadsOfMatricesHaveNoBankConflict) {
  use(kSm80);
  for (const int64_t dim : {64, 96, 128, 256}) {
    cuda_emulation::ldmatrix_conflicts = 0;
    check_causal({DType::kBFloat16, 70, 70, dim, dim}, 70);
    check_gathered({DType::kFloat16, 40, 90, dim, dim}, 64, 50);
    EXPECT_EQ(cuda_emulation::ldmatrix_conflicts, 0) << dim;
  }
}

// A block takes parts of several tiles of keys, of several sets: some are empty, others have fewer
// tiles than there is room for.
TEST(AttentionSm90, BlocksShareTheTilesOfAllMemorySets) {
  use(kSm90);
  for (const int64_t count : {1, 258, 387, 514}) {
    check_gathered({DType::kBFloat16, 300, 600, count == 258 ? 128 : 64, 64, 4, 2, 2}, 570, count,
                   {.scatter_add = count != 258, .reduce_max = count == 387});
  }
  // More parts of the rows than kMaxRowParts.
  check_gathered({DType::kFloat16, 2050, 2060}, 1, 1);
}

}  // namespace
}  // namespace h2o_prefill::testing
