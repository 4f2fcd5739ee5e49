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

// Reads the pickled form, and throws if it is anything else.
class StateReader {
 public:
  // The header is int64 [fields + layers * layer_fields], or [fields] if layers have no fields.
  StateReader(const std::vector<at::Tensor>& tensors, int64_t fields, int64_t layer_fields)
      : tensors_(tensors), fields_(fields), layer_fields_(layer_fields) {
    TORCH_CHECK_VALUE(!tensors.empty(), "tensors must begin with an int64 header, got none");
    const at::Tensor& header = tensors[0];
    const auto has_form = [&] {
      if (!header.defined() || header.dim() != 1 || header.scalar_type() != at::kLong) return false;
      const int64_t of_layers = header.size(0) - fields;
      return layer_fields == 0 ? of_layers == 0
                               : of_layers >= 0 && of_layers % layer_fields == 0 &&
                                     of_layers / layer_fields <= kMostLayers;
    };
    TORCH_CHECK_VALUE(has_form(), "tensors must begin with an int64 header of ", fields,
                      " fields and ", layer_fields, " per layer, got ", describe(header));
    numbers_ = header.cpu().contiguous();
  }

  int64_t field(int64_t i) const { return numbers_.const_data_ptr<int64_t>()[i]; }
  const int64_t* layer(int64_t i) const {
    return numbers_.const_data_ptr<int64_t>() + fields_ + i * layer_fields_;
  }
  int64_t num_layers() const { return (numbers_.size(0) - fields_) / layer_fields_; }

  // The next `count` tensors, `what` of a layer.
  const at::Tensor* take(size_t count, const char* what, int64_t layer = 0) {
    next_ += count;
    TORCH_CHECK_VALUE(next_ <= tensors_.size(), "tensors must hold ", what, " of layer ", layer,
                      ", got ", tensors_.size(), " tensors");
    return &tensors_[next_ - count];
  }
  void check_end() const {
    TORCH_CHECK_VALUE(next_ == tensors_.size(), "tensors must end after the last layer, got ",
                      tensors_.size() - next_, " more");
  }

 private:
  const std::vector<at::Tensor>& tensors_;
  at::Tensor numbers_;  // of the whole state, then of each layer
  int64_t fields_;
  int64_t layer_fields_;
  size_t next_ = 1;
};

}  // namespace h2o_prefill
