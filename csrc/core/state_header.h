// The state of layers: what its tensors are, and its pickled form, an int64 tensor in front of the
// others.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/tensor.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>

#include <vector>

#include "common/config_fields.h"
#include "common/rules.h"
#include "h2o_prefill/layer_state.h"

namespace h2o_prefill {

// State outlives the call, so it is ordinary tensors even if the call is made in inference mode, as
// an inference tensor could not be written outside of it; and it has no gradient.
struct StateGuard {
  c10::InferenceMode ordinary_tensors{false};
  at::NoGradGuard no_grad;
};

// A copy that shares no memory.
inline at::Tensor packed(const at::Tensor& t) { return t.clone(at::MemoryFormat::Contiguous); }

using LayerStates = std::vector<c10::intrusive_ptr<LayerState>>;

// Reads the pickled form, and throws if it is anything else.
class StateReader {
 public:
  // The header is int64 [fields + records * record_fields].
  StateReader(const std::vector<at::Tensor>& tensors, int64_t fields, int64_t record_fields)
      : tensors_(tensors), fields_(fields), record_fields_(record_fields) {
    TORCH_CHECK_VALUE(!tensors.empty(), "tensors must begin with an int64 header, got none");
    const at::Tensor& header = tensors[0];
    const auto has_form = [&] {
      if (!header.defined() || header.dim() != 1 || header.scalar_type() != at::kLong) return false;
      const int64_t of_records = header.size(0) - fields;
      return of_records >= 0 && of_records % record_fields == 0 &&
             of_records / record_fields <= kMostLayers;
    };
    TORCH_CHECK_VALUE(has_form(), "tensors must begin with an int64 header of ", fields,
                      " fields and ", record_fields, " a record, got ", describe(header));
    numbers_ = header.cpu().contiguous();
  }

  int64_t field(int64_t i) const { return numbers_.const_data_ptr<int64_t>()[i]; }
  int64_t num_records() const { return (numbers_.size(0) - fields_) / record_fields_; }
  int64_t record(int64_t i, int64_t field = 0) const {
    return this->field(fields_ + i * record_fields_ + field);
  }

  // The next `count` tensors.
  std::vector<at::Tensor> take(int64_t count, const char* what) {
    TORCH_CHECK_VALUE(count >= 0 && count <= std::ssize(tensors_) - next_, "tensors must hold ",
                      what, ", got ", tensors_.size(), " tensors");
    const auto first = tensors_.begin() + next_;
    next_ += count;
    return {first, first + count};
  }
  void check_end() const {
    TORCH_CHECK_VALUE(next_ == std::ssize(tensors_), "tensors must end after the last layer, got ",
                      std::ssize(tensors_) - next_, " more");
  }

 private:
  const std::vector<at::Tensor>& tensors_;
  at::Tensor numbers_;
  int64_t fields_;
  int64_t record_fields_;
  int64_t next_ = 1;
};

// The pickled form of several layers: a header of `fields` and the number of each layer's tensors,
// then `others`, then these. copies: as of LayerState::tensors().
inline std::vector<at::Tensor> tensors_of(std::vector<int64_t> fields, const LayerStates& layers,
                                          std::vector<at::Tensor> others = {}, bool copies = true) {
  others.insert(others.begin(), at::Tensor());
  for (const auto& layer : layers) {
    const auto tensors = layer->tensors(copies);
    fields.push_back(std::ssize(tensors));
    others.insert(others.end(), tensors.begin(), tensors.end());
  }
  others[0] = at::tensor(fields, at::kLong);
  return others;
}

// The layers of that form, all that is left of it.
inline LayerStates layers_of(StateReader& state) {
  LayerStates layers;
  for (int64_t i = 0; i < state.num_records(); ++i) {
    layers.push_back(LayerState::from_tensors(state.take(state.record(i), "all layers")));
  }
  check_num_layers(std::ssize(layers));
  state.check_end();
  return layers;
}

// Empty layers; LayerState takes the same arguments. Throws c10::ValueError for a wrong number.
inline LayerStates empty_layers(int64_t count, bool checkpoints = false,
                                int64_t initial_capacity = LayerState::kInitialCapacity,
                                int64_t max_capacity = LayerState::kMostTokens) {
  check_num_layers(count);
  LayerStates layers;
  for (int64_t i = 0; i < count; ++i) {
    layers.push_back(c10::make_intrusive<LayerState>(checkpoints, initial_capacity, max_capacity));
  }
  return layers;
}

// LayerState::truncate() and checkpoint_before() of all layers.
inline void truncate(const LayerStates& layers, int64_t length) {
  for (const auto& layer : layers) layer->truncate(length);
}

inline int64_t checkpoint_before(const LayerStates& layers, int64_t length) {
  for (int64_t before = length + 1; length != before;) {
    before = length;
    for (const auto& layer : layers) length = layer->checkpoint_before(length);
  }
  return length;
}

inline LayerStates cloned(const LayerStates& layers) {
  LayerStates copies;
  for (const auto& layer : layers) copies.push_back(layer->clone());
  return copies;
}

}  // namespace h2o_prefill
