// The rules that arguments of operators and classes share. Every error is a c10::ValueError that
// names the argument, the rule and the value.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>

#include <cstdint>
#include <string>
#include <string_view>

namespace h2o_prefill {

// "float16", "int64", ...: as torch prints them.
std::string dtype_name(at::ScalarType type);

// "[2, 3] int64 on cpu", or "none" for an undefined tensor.
std::string describe(const at::Tensor& t);

// A text from outside in one line of a message: without control characters.
std::string one_line(std::string_view text);

// Throws what a failed call of the system left in errno as a std::runtime_error of one line,
// "[Errno 13] cannot write 'path': Permission denied".
[[noreturn]] void throw_errno(const char* verb, const std::string& path);

void check_at_least(const char* name, int64_t value, int64_t least);
void check_at_most(const char* name, int64_t value, int64_t most);
// In [0, end).
void check_index(const char* name, int64_t value, int64_t end);
// In [least, most].
void check_between(const char* name, int64_t value, int64_t least, int64_t most);
// A call of num_tokens after `past` tokens: positions must fit int32.
void check_call_tokens(int64_t past, int64_t num_tokens);
void check_num_layers(int64_t num_layers);
void check_layer(int64_t layer, int64_t num_layers);

void check_strided(const char* name, const at::Tensor& t);
// A strided tensor with this number of dimensions.
void check_dims(const char* name, const at::Tensor& t, int64_t dims);
void check_size(const char* name, const at::Tensor& t, int64_t dim, int64_t size, const char* rule);
void check_dtype(const char* name, const at::Tensor& t, at::ScalarType type);

// float32, bfloat16, float16 or float64.
void check_float(const char* name, const at::Tensor& t);

// float32 or float64, the dtypes of scores.
void check_score_type(const char* name, const at::Tensor& t);

// Query heads share KV heads in groups of one size: q [B, Hq, ...] and k [B, Hkv, ...].
void check_head_groups(const at::Tensor& q, const at::Tensor& k);

// Device, or dtype and device, of another tensor, which `of` describes.
void check_device(const char* name, const at::Tensor& t, const at::Tensor& other, const char* of);
void check_same_kind(const char* name, const at::Tensor& t, const at::Tensor& other,
                     const char* of);

// Stored tensors have no gradient, so an input that requires one is refused.
void check_inference_only(const char* name, const at::Tensor& t);

}  // namespace h2o_prefill
