// The call that every op's C++ function makes.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <torch/library.h>

#include "h2o_prefill/ops.h"

namespace h2o_prefill {

// The registered op of this name, typed by the C++ function `Signature` that calls it.
template <typename Signature>
c10::TypedOperatorHandle<Signature> find_op(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<Signature>();
}

}  // namespace h2o_prefill
