#include "h2o_prefill/chunk_manager.h"

#include <limits>

#include "testing.h"

namespace h2o_prefill::testing {
namespace {

constexpr int64_t kLargest = std::numeric_limits<int64_t>::max();

TEST(ChunkManager, ChunksTileTheCall) {
  for (const int64_t past : {0, 7, 100}) {
    for (const int64_t chunk_size : {int64_t{1}, int64_t{3}, int64_t{8}, kLargest}) {
      for (const int64_t tokens : {0, 1, 7, 8, 9, 16, 17, 250}) {
        const ChunkManager chunks(past, tokens, chunk_size);
        int64_t expected_begin = past;
        for (int64_t c = 0; c < chunks.num_chunks(); ++c) {
          EXPECT_EQ(chunks.begin(c), expected_begin);
          EXPECT_GT(chunks.end(c), chunks.begin(c));
          EXPECT_LE(chunks.end(c) - chunks.begin(c), chunk_size);
          EXPECT_TRUE(c + 1 == chunks.num_chunks() ||
                      chunks.end(c) - chunks.begin(c) == chunk_size);
          expected_begin = chunks.end(c);
        }
        EXPECT_EQ(expected_begin, past + tokens);
        const int64_t last = chunks.num_chunks() - 1;
        EXPECT_EQ(chunks.last_chunk_begin(), last < 0 ? past : chunks.begin(last));
      }
    }
  }
}

}  // namespace
}  // namespace h2o_prefill::testing
