#include "h2o_prefill/ops.h"
#include "testing.h"

namespace h2o_prefill::testing {
namespace {

at::Tensor call(const at::Tensor& scores, const at::Tensor& memory, int64_t begin, int64_t end,
                const Budgets& b) {
  return select_memory(scores, memory, begin, end, b.local_window, b.heavy_budget, b.sink_tokens);
}

at::Tensor no_memory(int64_t batch = 1, int64_t heads = 1) {
  return at::empty({batch, heads, 0}, at::kInt);
}

// In float64 plain PyTorch operations select, which tests of the Python package hold to the
// reference.
TEST(SelectMemory, EqualsTheSelectionInFloat64OverManyChunks) {
  for (const Budgets& budgets :
       {Budgets{3, 5, 0}, Budgets{0, 6, 2}, Budgets{4, 0, 1}, Budgets{0, 0, 0}, Budgets{30, 3, 0},
        Budgets{3, 200, 0}, Budgets{2, 2, 30}}) {
    at::manual_seed(3);
    // Few distinct values: most scores tie with others.
    const auto scores = at::randint(0, 5, {2, 3, 100}, at::kFloat);
    auto memory = no_memory(2, 3);
    int64_t begin = 0;
    for (const int64_t end : {1, 2, 20, 33, 50, 97}) {
      const auto expected = call(scores.to(at::kDouble), memory, begin, end, budgets);
      memory = call(scores, memory, begin, end, budgets);
      EXPECT_TRUE(same(memory, expected)) << "chunk [" << begin << ", " << end << ")";
      begin = end;
    }
  }
}

}  // namespace
}  // namespace h2o_prefill::testing
