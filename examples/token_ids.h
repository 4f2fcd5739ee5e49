// Token ids of a text, which a program takes from a file.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

namespace examples {

// Token ids, int64 [1, n]: numbers as text, or int64 values of a file that ends in .bin. "-":
// numbers from standard input. Throws std::runtime_error if there are none, or other things.
at::Tensor read_token_ids(const std::string& path);

// Throws std::runtime_error if token_ids, int64 [1, T], are none, or some are not in
// [0, vocabulary).
void check_token_ids(const at::Tensor& token_ids, int64_t vocabulary);

}  // namespace examples
