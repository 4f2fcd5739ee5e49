// Grids over the rows of many lists, as the kernels that move rows use them.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

namespace h2o_prefill {

// x: the rows of a list, rows_of_cta a CTA; y: the lists. More lists than a grid has room for come
// in turns.
inline dim3 grid_of_rows(int64_t rows, int64_t rows_of_cta, int64_t lists) {
  constexpr int64_t kMostLists = 65535;
  return dim3(static_cast<unsigned>((rows + rows_of_cta - 1) / rows_of_cta),
              static_cast<unsigned>(lists < kMostLists ? lists : kMostLists));
}

}  // namespace h2o_prefill
