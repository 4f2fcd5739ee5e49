#include "kernels/cpu/memory_count.h"

#include <c10/util/Exception.h>

namespace h2o_prefill {

std::vector<int64_t> memory_counts(const at::Tensor& indices, int64_t length, const char* name) {
  const int64_t lists = indices.size(0) * indices.size(1);
  const int64_t width = indices.size(2);
  std::vector<int64_t> counts(lists);
  for (int64_t list = 0; list < lists; ++list) {
    const int32_t* positions = indices.const_data_ptr<int32_t>() + list * width;
    int64_t& count = counts[list];
    while (count < width && positions[count] >= 0) {
      TORCH_CHECK_VALUE(positions[count] < length, name, " must hold positions below ", length,
                        ", got ", positions[count]);
      ++count;
    }
    for (int64_t i = count; i < width; ++i) {
      TORCH_CHECK_VALUE(positions[i] == -1, name, " must hold -1 only behind all positions, got ",
                        positions[i], " behind a -1");
    }
  }
  return counts;
}

}  // namespace h2o_prefill
