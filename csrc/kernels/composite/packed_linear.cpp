#include <ATen/ATen.h>
#include <torch/library.h>

#include "common/checks.h"
#include "kernels/composite/composite.h"

namespace h2o_prefill::composite {
namespace {

using at::indexing::Slice;

// Rows of a packed weight, float32: ids [n] -> [n, inputs].
at::Tensor packed_rows(const at::Tensor& ids, const at::Tensor& packed, const at::Tensor& scales) {
  const auto panel = ids.floor_divide(kPanelOutputs), output = ids.remainder(kPanelOutputs);
  auto weights = packed;
  if (packed.scalar_type() == at::kBFloat16) {
    weights = packed.view({packed.size(0), packed.size(1) / 2, kPanelOutputs, 2});
  }
  const auto rows = weights.index({panel, Slice(), output}).flatten(1).to(at::kFloat);
  return scales.numel() > 0 ? rows * scales.index({ids}).unsqueeze(1) : rows;
}

}  // namespace

std::tuple<at::Tensor, at::Tensor> pack_linear(const at::Tensor& weight, std::string_view format) {
  check_pack_linear(weight, format);
  const int64_t outputs = weight.size(0), inputs = weight.size(1);
  at::Tensor scales = at::empty({0}, weight.options().dtype(at::kFloat)), numbers = weight;
  if (format == "int8") {
    numbers = weight.to(at::kFloat);
    scales = (numbers.abs().amax(1) / 127).clamp_min(1e-30);
    numbers = (numbers / scales.unsqueeze(1)).round();
  }
  numbers = numbers.to(format == "int8"      ? at::kChar
                       : format == "float16" ? at::kHalf
                                             : at::kBFloat16);
  const int64_t panels = divide_up(outputs, kPanelOutputs), padded = panels * kPanelOutputs;
  numbers = at::constant_pad_nd(numbers, {0, 0, 0, padded - outputs})
                .view({panels, kPanelOutputs, inputs});
  if (format != "bfloat16") return {numbers.transpose(1, 2).contiguous(), scales};
  const auto paired = numbers.view({panels, kPanelOutputs, inputs / 2, 2}).transpose(1, 2);
  return {paired.reshape({panels, inputs, kPanelOutputs}), scales};
}

at::Tensor linear(const at::Tensor& x, const at::Tensor& packed, const at::Tensor& scales,
                  const std::optional<at::Tensor>& bias, int64_t outputs) {
  check_linear(x, packed, scales, bias, outputs);
  const auto type = accumulate_type(x);
  const auto ids = at::arange(outputs, packed.options().dtype(at::kLong));
  const auto weight = packed_rows(ids, packed, scales).to(type);
  const auto start = bias ? bias->to(type) : at::Tensor();
  return at::linear(x.to(type), weight, start).to(x.scalar_type());
}

at::Tensor packed_embedding(const at::Tensor& ids, const at::Tensor& packed,
                            const at::Tensor& scales, int64_t outputs) {
  check_packed_embedding(ids, packed, scales, outputs);
  auto shape = ids.sizes().vec();
  shape.push_back(packed.size(1));
  return packed_rows(ids.reshape({-1}), packed, scales).view(shape);
}

TORCH_LIBRARY_IMPL(h2o_prefill, CompositeExplicitAutograd, m) {
  m.impl("pack_linear", &pack_linear);
  m.impl("linear", &linear);
  m.impl("packed_embedding", &packed_embedding);
}

}  // namespace h2o_prefill::composite
