// The schema of an op, and the call that its C++ function makes.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include <optional>

#include "h2o_prefill/ops.h"

namespace h2o_prefill {

// The registered op of this name, typed by the C++ function `Signature` that calls it.
template <typename Signature>
c10::TypedOperatorHandle<Signature> find_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

// An optional argument of a schema.
inline std::optional<at::Tensor> if_defined(const at::Tensor& t) {
  return t.defined() ? std::optional<at::Tensor>(t) : std::nullopt;
}

}  // namespace h2o_prefill

// Registers the schema of an op whose fake is in h2o_prefill/_meta.py.
#define H2O_SCHEMA(schema)                    \
  TORCH_LIBRARY_FRAGMENT(h2o_prefill, m) {    \
    m.set_python_module("h2o_prefill._meta"); \
    m.def(schema);                            \
  }
