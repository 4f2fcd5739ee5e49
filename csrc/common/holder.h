// Classes that are not reference-counted, inside of registered ones that are.
#pragma once

#include <ATen/core/ivalue.h>

#include <type_traits>
#include <utility>

#include "h2o_prefill/config.h"

namespace h2o_prefill {

template <typename T>
struct Holder : torch::CustomClassHolder {
  template <typename... Arguments>
  explicit Holder(Arguments&&... arguments) : object(std::forward<Arguments>(arguments)...) {}
  T object;
};
template <typename T>
using Held = c10::intrusive_ptr<Holder<T>>;

inline Held<PrefillConfig> hold(PrefillConfig config) {
  config.check();
  return c10::make_intrusive<Holder<PrefillConfig>>(std::move(config));
}

// What a registered method of T gets as `self`, and the object that it is called on.
template <typename T>
using SelfOf = std::conditional_t<std::is_base_of_v<torch::CustomClassHolder, T>,
                                  c10::intrusive_ptr<T>, Held<T>>;
template <typename T>
T& object_of(const SelfOf<T>& self) {
  if constexpr (std::is_base_of_v<torch::CustomClassHolder, T>) {
    return *self;
  } else {
    return self->object;
  }
}

// A method of T, as registered classes have it: it returns a value, and settings held.
template <typename T, typename Result, typename... Arguments>
auto of(Result (T::*method)(Arguments...) const) {
  return [method](const SelfOf<T>& self, Arguments... arguments) {
    if constexpr (std::is_same_v<std::decay_t<Result>, PrefillConfig>) {
      return hold((object_of<T>(self).*method)(arguments...));
    } else {
      return (object_of<T>(self).*method)(arguments...);
    }
  };
}
template <typename T, typename Result, typename... Arguments>
auto of(Result (T::*method)(Arguments...)) {
  return [method](const SelfOf<T>& self, Arguments... arguments) {
    return (object_of<T>(self).*method)(arguments...);
  };
}

}  // namespace h2o_prefill
