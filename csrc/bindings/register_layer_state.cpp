// torch.classes.h2o_prefill.LayerState.
#include <torch/custom_class.h>
#include <torch/library.h>

#include <optional>
#include <string>
#include <tuple>

#include "common/prefill_request.h"
#include "h2o_prefill/layer_state.h"

namespace h2o_prefill {
namespace {

using torch::arg;
using State = c10::intrusive_ptr<LayerState>;

LayerOptions options_of(int64_t layer, std::string_view settings, std::optional<double> scale,
                        const OptionalTensor& sinks, double softcap, const OptionalTensor& offsets,
                        const OptionalTensor& positions, const OptionalTensor& visible_from,
                        std::optional<int64_t> window) {
  return {.layer = layer,
          .settings = settings,
          .scale = scale,
          .sinks = sinks,
          .softcap = softcap,
          .recall = recall_lists(offsets, positions, visible_from),
          .window = window};
}

// A tensor of the state, None where there is none.
template <at::Tensor (LayerState::*get)() const>
OptionalTensor tensor_of(const State& self) {
  const at::Tensor x = ((*self).*get)();
  return x.defined() ? OptionalTensor(x) : std::nullopt;
}

}  // namespace

void register_layer_state(torch::Library& m) {
  m.class_<LayerState>("LayerState")
      .def(torch::init<bool, int64_t, int64_t>(),
           "What one layer knows of one prompt: keys, values, and the state of sparse prefill.",
           {arg("checkpoints") = false, arg("initial_capacity") = LayerState::kInitialCapacity,
            arg("max_capacity") = LayerState::kMostTokens})
      .def_property("key", &tensor_of<&LayerState::key>)
      .def_property("value", &tensor_of<&LayerState::value>)
      .def_property("scores", &tensor_of<&LayerState::scores>)
      .def_property("memory", &tensor_of<&LayerState::memory>)
      .def_property("errors", &tensor_of<&LayerState::errors>)
      .def_property("length", &LayerState::length)
      .def_property("scored", &LayerState::scored)
      .def_property("last_chunk_begin", &LayerState::last_chunk_begin)
      .def_property("capacity", &LayerState::capacity)
      .def("append", &LayerState::append,
           "Append key [B, Hkv, T, D] and value [B, Hkv, T, Dv]; return views of all tokens.",
           {arg("key"), arg("value")})
      .def("set_keys", &LayerState::set_keys,
           "Replace keys and values by tensors, which the state does not write to.",
           {arg("key"), arg("value")})
      .def("attend",
           [](const State& self, const at::Tensor& query, int64_t layer,
              const std::string& settings, std::optional<double> scale, const OptionalTensor& sinks,
              double softcap, const OptionalTensor& recall_offsets,
              const OptionalTensor& recall_positions, const OptionalTensor& recall_visible_from,
              std::optional<int64_t> window, std::optional<int64_t> total) {
             return self->attend(query,
                                 options_of(layer, settings, scale, sinks, softcap, recall_offsets,
                                            recall_positions, recall_visible_from, window),
                                 total);
           },
           "Attend with query [B, Hq, T, D] of the last T of the first `total` tokens, by default "
           "of all; return [B, Hq, T, Dv].",
           {arg("query"), arg("layer"), arg("settings"), arg("scale") = std::optional<double>(),
            arg("sinks") = OptionalTensor(), arg("softcap") = 0.0,
            arg("recall_offsets") = OptionalTensor(), arg("recall_positions") = OptionalTensor(),
            arg("recall_visible_from") = OptionalTensor(), arg("window") = std::optional<int64_t>(),
            arg("total") = std::optional<int64_t>()})
      .def(
          "attend_history",
          [](const State& self, const at::Tensor& query, const at::Tensor& key,
             const at::Tensor& value, int64_t layer, const std::string& settings,
             std::optional<double> scale, const OptionalTensor& sinks, double softcap,
             const OptionalTensor& recall_offsets, const OptionalTensor& recall_positions,
             const OptionalTensor& recall_visible_from, std::optional<int64_t> window) {
            return self->attend_history(
                query, key, value,
                options_of(layer, settings, scale, sinks, softcap, recall_offsets, recall_positions,
                           recall_visible_from, window));
          },
          "Attend as `attend` does, with keys [B, Hkv, T_total, D] and values of all tokens.",
          {arg("query"), arg("key"), arg("value"), arg("layer"), arg("settings"),
           arg("scale") = std::optional<double>(), arg("sinks") = OptionalTensor(),
           arg("softcap") = 0.0, arg("recall_offsets") = OptionalTensor(),
           arg("recall_positions") = OptionalTensor(),
           arg("recall_visible_from") = OptionalTensor(), arg("window") = std::optional<int64_t>()})
      .def(
          "set_scores",
          [](const State& self, const at::Tensor& scores, const at::Tensor& memory,
             int64_t last_chunk_begin, const OptionalTensor& errors) {
            self->set_scores({scores, memory, last_chunk_begin, or_undefined(errors)});
          },
          "Replace the state of sparse prefill by a copy.",
          {arg("scores"), arg("memory"), arg("last_chunk_begin"), arg("errors") = OptionalTensor()})
      .def("checkpoint",
           [](const State& self, int64_t layer, const std::string& settings) {
             auto [memory, scores, errors] =
                 self->checkpoint(read_settings(settings)->of_layer(layer));
             return std::make_tuple(std::move(memory), std::move(scores), std::move(errors));
           },
           "Return the set that the next chunk attends to, its scores, and the errors.",
           {arg("layer"), arg("settings")})
      .def_static(
          "at_checkpoint",
          [](int64_t length, const at::Tensor& memory, const at::Tensor& scores,
             const at::Tensor& errors) {
            return LayerState::at_checkpoint(length, {memory, scores, errors});
          },
          "Return a state of `length` tokens without keys that goes on from a checkpoint.")
      .def("truncate", &LayerState::truncate, "Remove the tokens after the first `length`.",
           {arg("length")})
      .def("checkpoint_before", &LayerState::checkpoint_before,
           "Return the last length, up to this one, to which truncate is exact.", {arg("length")})
      .def("reset", &LayerState::reset, "Remove all tokens; the buffers stay allocated.")
      .def("select", &LayerState::select, "Select rows of the batch, int64 [B'].", {arg("rows")})
      .def("repeat", &LayerState::repeat, "Repeat each row of the batch.", {arg("repeats")})
      .def("to", &LayerState::to, "Move all tensors to a device.", {arg("device")})
      .def("clone", &LayerState::clone, "Return an independent copy.")
      .def(
          "tensors", [](const State& self) { return self->tensors(); },
          "Return everything as plain tensors: copies.")
      .def_static("from_tensors", &LayerState::from_tensors,
                  "Build a state from what tensors() returned.")
      .def_pickle([](const State& self) { return self->tensors(); },
                  [](const std::vector<at::Tensor>& x) { return LayerState::from_tensors(x); });
}

}  // namespace h2o_prefill
