// Products of a packed linear layer by the kernels of an instruction set, and in float64.
#pragma once

#include <string>
#include <vector>

#include "kernels/cpu/packed_linear.h"
#include "kernels/rows.h"

namespace h2o_prefill::testing {

struct LayerSpec {
  PanelType type;
  int64_t tokens;
  int64_t inputs;
  int64_t panels;
  bool is_scaled;  // and has a bias
};

// Where the weight of an output of a panel lies in it.
inline int64_t place_of(const LayerSpec& spec, int64_t output, int64_t input) {
  return spec.type == PanelType::kBFloat16 ? input / 2 * 32 + output * 2 + input % 2
                                           : input * kPanelOutputs + output;
}

// What is wrong with the result of multiply_many or, of few tokens, multiply_few; "" if nothing.
inline std::string wrong_products(const PackedLinearKernels& kernels, const LayerSpec& spec,
                                  bool by_few) {
  Random random(7);
  const int64_t outputs = spec.panels * kPanelOutputs;
  const int64_t padded = round_up(outputs, PackedLinearArgs::kTileOutputs);
  const DType dtype = spec.type == PanelType::kFloat16 ? DType::kFloat16 : DType::kBFloat16;
  Rows numbers(dtype, spec.panels, spec.inputs * kPanelOutputs);  // of 16 bits
  std::vector<int8_t> bytes(outputs * spec.inputs);
  Rows x(DType::kFloat32, spec.tokens, spec.inputs), scales(DType::kFloat32, 1, outputs);
  Rows bias(DType::kFloat32, 1, padded), out(DType::kFloat32, spec.tokens, padded);
  for (Rows* rows : {&numbers, &x, &scales, &bias}) random.fill(*rows, 1.0);
  for (int8_t& byte : bytes) byte = static_cast<int8_t>(random.below(255) - 127);
  std::vector<float> scratch(PackedLinearArgs::kScratchFloats, static_cast<float>(kNan));
  const bool is_int8 = spec.type == PanelType::kInt8;
  const auto floats = [&](Rows& rows) {
    return spec.is_scaled ? static_cast<const float*>(rows.data()) : nullptr;
  };
  const PackedLinearArgs args{static_cast<const float*>(x.data()),
                              spec.tokens,
                              spec.inputs,
                              is_int8 ? static_cast<const void*>(bytes.data()) : numbers.data(),
                              spec.panels,
                              spec.type,
                              floats(scales),
                              floats(bias),
                              static_cast<float*>(out.data()),
                              padded};
  if (by_few) {  // two threads' parts, and all at once: the same bits
    kernels.multiply_few(args, 0, spec.panels / 3);
    kernels.multiply_few(args, spec.panels / 3, spec.panels);
    const std::vector<float> parts(args.out, args.out + spec.tokens * padded);
    kernels.multiply_few(args, 0, spec.panels);
    for (int64_t i = 0; i < spec.tokens * padded; ++i) {
      if (i % padded < outputs && parts[i] != args.out[i]) return "depends on the split by panels";
    }
  } else {
    kernels.multiply_many(args, 0, padded, scratch.data());
  }
  for (int64_t t = 0; t < spec.tokens; ++t) {
    for (int64_t o = 0; o < outputs; ++o) {
      double sum = 0.0, magnitude = 1.0;
      for (int64_t i = 0; i < spec.inputs; ++i) {
        const int64_t place = place_of(spec, o % kPanelOutputs, i), panel = o / kPanelOutputs;
        const double w = is_int8 ? bytes[panel * spec.inputs * kPanelOutputs + place]
                                 : numbers.get(panel, place);
        sum += x.get(t, i) * w;
        magnitude += std::abs(x.get(t, i) * w);
      }
      if (spec.is_scaled) sum = sum * scales.get(0, o) + bias.get(0, o);
      if (!(std::abs(out.get(t, o) - sum) <= 2e-6 * magnitude)) {
        return "token " + std::to_string(t) + ", output " + std::to_string(o) + ": " +
               std::to_string(out.get(t, o)) + " instead of " + std::to_string(sum);
      }
    }
  }
  return "";
}

}  // namespace h2o_prefill::testing
