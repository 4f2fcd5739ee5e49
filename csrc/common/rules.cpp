#include "common/rules.h"

#include <ATen/core/grad_mode.h>
#include <c10/core/ScalarType.h>

#include <cctype>
#include <cerrno>
#include <stdexcept>
#include <system_error>

#include "common/config_fields.h"

namespace h2o_prefill {

std::string dtype_name(at::ScalarType type) { return std::string(c10::getDtypeNames(type).first); }

std::string describe(const at::Tensor& t) {
  if (!t.defined()) return "none";
  return c10::str(t.sizes(), ' ', dtype_name(t.scalar_type()), " on ", t.device());
}

std::string one_line(std::string_view text) {
  std::string line;
  for (const char c : text) {
    const bool control = std::iscntrl(static_cast<unsigned char>(c)) != 0;
    line.append(!control ? std::string(1, c) : c == '\n' ? "\\n" : "?");
  }
  return line;
}

void throw_errno(const char* verb, const std::string& path) {
  const std::error_code error(errno, std::generic_category());
  throw std::runtime_error(c10::str("[Errno ", error.value(), "] cannot ", verb, " '",
                                    one_line(path), "': ", error.message()));
}

void check_at_least(const char* name, int64_t value, int64_t least) {
  TORCH_CHECK_VALUE(value >= least, name, " must be >= ", least, ", got ", value);
}

void check_at_most(const char* name, int64_t value, int64_t most) {
  TORCH_CHECK_VALUE(value <= most, name, " must be <= ", most, ", got ", value);
}

void check_index(const char* name, int64_t value, int64_t end) {
  TORCH_CHECK_VALUE(value >= 0 && value < end, name, " must be in [0, ", end, "), got ", value);
}

void check_between(const char* name, int64_t value, int64_t least, int64_t most) {
  TORCH_CHECK_VALUE(value >= least && value <= most, name, " must be in [", least, ", ", most,
                    "], got ", value);
}

void check_call_tokens(int64_t past, int64_t num_tokens) {
  check_at_least("past", past, 0);
  check_at_most("past", past, kLargestSetting);
  check_at_least("num_tokens", num_tokens, 0);
  check_at_most("num_tokens", num_tokens, kLargestSetting - past);
}

void check_num_layers(int64_t num_layers) {
  check_at_least("num_layers", num_layers, 1);
  check_at_most("num_layers", num_layers, kMostLayers);
}

void check_layer(int64_t layer, int64_t num_layers) { check_index("layer", layer, num_layers); }

void check_strided(const char* name, const at::Tensor& t) {
  TORCH_CHECK_VALUE(t.defined(), name, " must be a tensor, got none");
  TORCH_CHECK_VALUE(t.layout() == at::kStrided, name, " must be a strided tensor, got layout ",
                    t.layout());
}

void check_dims(const char* name, const at::Tensor& t, int64_t dims) {
  check_strided(name, t);
  TORCH_CHECK_VALUE(t.dim() == dims, name, " must have ", dims, " dimensions, got shape ",
                    t.sizes());
}

void check_size(const char* name, const at::Tensor& t, int64_t dim, int64_t size,
                const char* rule) {
  TORCH_CHECK_VALUE(t.size(dim) == size, name, " must have ", rule, " (", size, ") in dimension ",
                    dim, ", got shape ", t.sizes());
}

void check_dtype(const char* name, const at::Tensor& t, at::ScalarType type) {
  TORCH_CHECK_VALUE(t.scalar_type() == type, name, " must be ", dtype_name(type), ", got ",
                    dtype_name(t.scalar_type()));
}

void check_float(const char* name, const at::Tensor& t) {
  const auto type = t.scalar_type();
  TORCH_CHECK_VALUE(
      type == at::kFloat || type == at::kBFloat16 || type == at::kHalf || type == at::kDouble, name,
      " must be float32, bfloat16, float16 or float64, got ", dtype_name(type));
}

void check_score_type(const char* name, const at::Tensor& t) {
  TORCH_CHECK_VALUE(t.scalar_type() == at::kFloat || t.scalar_type() == at::kDouble, name,
                    " must be float32 or float64, got ", dtype_name(t.scalar_type()));
}

void check_head_groups(const at::Tensor& q, const at::Tensor& k) {
  TORCH_CHECK_VALUE(k.size(1) > 0 && q.size(1) % k.size(1) == 0,
                    "the query heads must be a multiple of the KV heads, got ", q.size(1), " and ",
                    k.size(1));
}

void check_device(const char* name, const at::Tensor& t, const at::Tensor& other, const char* of) {
  TORCH_CHECK_VALUE(t.device() == other.device(), name, " must be on the device of ", of, " (",
                    other.device(), "), got ", t.device());
}

void check_same_kind(const char* name, const at::Tensor& t, const at::Tensor& other,
                     const char* of) {
  TORCH_CHECK_VALUE(t.scalar_type() == other.scalar_type() && t.device() == other.device(), name,
                    " must have dtype and device of ", of, " (", dtype_name(other.scalar_type()),
                    " on ", other.device(), "), got ", dtype_name(t.scalar_type()), " on ",
                    t.device());
}

void check_inference_only(const char* name, const at::Tensor& t) {
  TORCH_CHECK_VALUE(!(at::GradMode::is_enabled() && t.requires_grad()), name,
                    " must not require a gradient while gradients are on: what is kept "
                    "has none, call it under torch.no_grad() or torch.inference_mode(), or detach "
                    "the input");
}

}  // namespace h2o_prefill
