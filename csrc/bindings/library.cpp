#include "h2o_prefill/library.h"

#include <torch/library.h>

#include "common/prefill_request.h"
#include "h2o_prefill/crossover.h"
#include "kernels/cpu/attend_rows.h"
#include "kernels/cpu/cpu_features.h"

namespace h2o_prefill {

void init() { cpu_kernels(); }

std::string version() { return H2O_VERSION; }

bool has_cuda() {
#ifdef H2O_HAVE_CUDA
  return true;
#else
  return false;
#endif
}

std::string cpu_isa() { return cpu_kernels().isa; }

// Functions without tensors: the same for every device, and for TorchScript.
TORCH_LIBRARY_FRAGMENT(h2o_prefill, m) {
  m.def("version() -> str", [] { return version(); });
  m.def("has_cuda() -> bool", [] { return has_cuda(); });
  m.def("cpu_isa() -> str", [] { return cpu_isa(); });
  m.def("cpu_features() -> str", [] { return cpu_features(); });
  m.def("device_cost(Device device, ScalarType dtype) -> (str, float, bool)",
        [](at::Device device, at::ScalarType dtype) {
          const DeviceCost cost = device_cost(device, dtype);
          return std::make_tuple(cost.device, cost.sparse_product, cost.measured);
        });
  m.def("is_sparse(str settings, int layer, int past, int num_tokens) -> bool",
        [](std::string_view settings, int64_t layer, int64_t past, int64_t num_tokens) {
          return read_settings(settings)->is_sparse(layer, past, num_tokens);
        });
}

}  // namespace h2o_prefill
