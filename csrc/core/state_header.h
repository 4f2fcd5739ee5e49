// The state of all layers: what its tensors are, and its pickled form, an int64 tensor in front of
// the others.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <vector>

#include "common/config_fields.h"
#include "common/rules.h"

namespace h2o_prefill {

// State outlives the call, so it is ordinary tensors even if the call is made in inference mode, as
// an inference tensor could not be written outside of it; and it has no gradient.
struct StateGuard {
  c10::InferenceMode ordinary_tensors{false};
  at::NoGradGuard no_grad;
};

struct StateHeader {
  int64_t operator[](int64_t field) const { return numbers[field]; }
  const int64_t* layer(int64_t i) const { return numbers.data() + fields + i * layer_fields; }
  int64_t num_layers() const {
    return (static_cast<int64_t>(numbers.size()) - fields) / layer_fields;
  }

  std::vector<int64_t> numbers;  // the fields of the whole state, then of each layer
  int64_t fields;
  int64_t layer_fields;
};

// Reads tensors[0], int64 [fields + layers * layer_fields] with at least one layer, or [fields] if
// layers have no fields. Throws if it is anything else.
inline StateHeader read_header(const std::vector<at::Tensor>& tensors, int64_t fields,
                               int64_t layer_fields) {
  TORCH_CHECK_VALUE(!tensors.empty(), "tensors must begin with an int64 header, got none");
  const at::Tensor& header = tensors[0];
  const auto has_form = [&] {
    if (!header.defined() || header.dim() != 1 || header.scalar_type() != at::kLong) return false;
    const int64_t of_layers = header.size(0) - fields;
    return layer_fields == 0 ? of_layers == 0
                             : of_layers >= layer_fields && of_layers % layer_fields == 0 &&
                                   of_layers / layer_fields <= kMostLayers;
  };
  TORCH_CHECK_VALUE(has_form(), "tensors must begin with an int64 header of ", fields,
                    " fields and ", layer_fields, " per layer, got ", describe(header));
  const auto here = header.cpu().contiguous();
  const auto* first = here.const_data_ptr<int64_t>();
  return {{first, first + here.numel()}, fields, layer_fields};
}

// Checks that `count` tensors of a layer, `what`, are there from `next` on.
inline void check_more(const std::vector<at::Tensor>& tensors, size_t next, size_t count,
                       const char* what, int64_t layer) {
  TORCH_CHECK_VALUE(next + count <= tensors.size(), "tensors must hold ", what, " of layer ", layer,
                    ", got ", tensors.size(), " tensors");
}

inline void check_no_more(const std::vector<at::Tensor>& tensors, size_t next) {
  TORCH_CHECK_VALUE(next == tensors.size(), "tensors must end after the last layer, got ",
                    tensors.size() - next, " more");
}

}  // namespace h2o_prefill
