#include <ATen/ATen.h>
#include <torch/library.h>

#include <algorithm>

#include "common/checks.h"
#include "kernels/composite/composite.h"
#include "kernels/cpu/attend_rows.h"
#include "kernels/cpu/tasks.h"
#include "kernels/cpu/workspace.h"

namespace h2o_prefill {
namespace {

using Args = PackedLinearArgs;

// Tokens that are worth the conversion of weights, tokens of a product by AMX, and tokens that are
// worth a copy of the weights for oneDNN.
constexpr int64_t kLeastTokens = 128;
constexpr int64_t kGemmTokens = 128;
constexpr int64_t kPlainTokens = 256;

PanelType panel_type(at::ScalarType type) {
  if (type == at::kChar) return PanelType::kInt8;
  return type == at::kHalf ? PanelType::kFloat16 : PanelType::kBFloat16;
}

// float32 [outputs, padded with zeros].
at::Tensor padded_floats(const at::Tensor& t, int64_t size) {
  const auto floats = t.to(at::kFloat).contiguous();
  return t.size(0) == size ? floats : at::constant_pad_nd(floats, {0, size - t.size(0)});
}

// Few tokens: memory is read once, in parts worth waking a thread for.
void multiply_few(const Args& args) {
  const int64_t least = divide_up(kSerialWork / 8, args.inputs * kPanelOutputs);
  at::parallel_for(0, args.num_panels, least, [&](int64_t begin, int64_t end) {
    cpu_kernels().packed_linear->multiply_few(args, begin, end);
  });
}

// Blocks of tokens and outputs, of nearly the same size.
void multiply_many(const Args& args) {
  const int64_t output_blocks = divide_up(args.out_stride, Args::kBlockOutputs);
  const int64_t outputs = round_up(divide_up(args.out_stride, output_blocks), Args::kTileOutputs);
  const bool serial = args.tokens * args.inputs * args.out_stride < kSerialWork;
  const int64_t threads = serial ? 1 : at::get_num_threads();
  const int64_t most = divide_up(args.tokens * output_blocks, threads * kTasksPerThread);
  const int64_t token_blocks =
      divide_up(args.tokens, std::clamp(most, kLeastTokens, Args::kBlockTokens));
  const int64_t tokens = divide_up(args.tokens, token_blocks);
  Workspace workspace;
  const auto scratch = workspace.add<float>(threads * Args::kScratchFloats);
  workspace.allocate();
  for_each_task(TaskRange{token_blocks * output_blocks}, threads,
                [&](int64_t task, int64_t thread) {
                  const int64_t first = task / output_blocks * tokens;
                  const int64_t begin = task % output_blocks * outputs;
                  if (first >= args.tokens || begin >= args.out_stride) return;
                  Args block = args;
                  block.x += first * args.inputs;
                  block.out += first * args.out_stride;
                  block.tokens = std::min(tokens, args.tokens - first);
                  cpu_kernels().packed_linear->multiply_many(
                      block, begin, std::min(begin + outputs, args.out_stride),
                      workspace.get(scratch) + thread * Args::kScratchFloats);
                });
}

// Products of bfloat16 by AMX: panels lie as it reads them. x: [tokens, inputs].
void multiply_bfloat16(const Args& args, const at::BFloat16* x) {
  const int64_t blocks = divide_up(args.tokens, kGemmTokens);
  const auto* panels = static_cast<const at::BFloat16*>(args.panels);
  const CpuKernels& kernels = cpu_kernels();
  at::parallel_for(0, blocks * args.num_panels, 1, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t first = task / args.num_panels * kGemmTokens, panel = task % args.num_panels;
      kernels.gemm(std::min(kGemmTokens, args.tokens - first), kPanelOutputs, args.inputs,
                   args.inputs, kPanelOutputs, args.out_stride, /*add=*/false,
                   x + first * args.inputs, panels + panel * args.inputs * kPanelOutputs,
                   args.out + first * args.out_stride + panel * kPanelOutputs);
    }
    kernels.gemm_release();
  });
}

// Products of bfloat16 by oneDNN, which reads [outputs, inputs]: panels of bfloat16 or int8, whose
// products with the scales are rounded.
at::Tensor multiply_plain(const at::Tensor& x, const Args& args, const OptionalTensor& bias,
                          int64_t outputs) {
  const int64_t padded = args.num_panels * kPanelOutputs;
  // Kept for the next layer: the first touch of so much memory takes longer than the copy.
  Workspace workspace;
  const auto plain = workspace.add<uint16_t>(padded * args.inputs);
  workspace.allocate();
  at::parallel_for(0, args.num_panels, 1, [&](int64_t begin, int64_t end) {
    cpu_kernels().packed_linear->unpack(args, begin, end, workspace.get(plain));
  });
  const auto weight = at::from_blob(workspace.get(plain), {padded, args.inputs}, x.options());
  auto out = at::linear(x, weight.narrow(0, 0, outputs));
  return bias ? out.add_(*bias) : out;
}

at::Tensor linear_cpu(const at::Tensor& x_argument, const at::Tensor& packed,
                      const at::Tensor& scales_argument, const OptionalTensor& bias_argument,
                      int64_t outputs) {
  check_linear(x_argument, packed, scales_argument, bias_argument, outputs);
  const auto dtype = x_argument.scalar_type();
  if (dtype == at::kDouble) {
    return composite::linear(x_argument, packed, scales_argument, bias_argument, outputs);
  }
  const int64_t inputs = packed.size(1), panels = packed.size(0);
  const int64_t tokens = x_argument.numel() / inputs,
                padded = round_up(outputs, Args::kTileOutputs);
  const bool few = tokens <= Args::kFewTokens;
  const bool is_bfloat16 = dtype == at::kBFloat16;
  at::Tensor scales, bias;
  if (scales_argument.numel() > 0) scales = padded_floats(scales_argument, panels * kPanelOutputs);
  Args args{};
  args.tokens = tokens;
  args.inputs = inputs;
  args.panels = packed.const_data_ptr();
  args.num_panels = panels;
  args.type = panel_type(packed.scalar_type());
  args.scales = scales.defined() ? scales.const_data_ptr<float>() : nullptr;
  if (is_bfloat16 && tokens >= kPlainTokens && args.type != PanelType::kFloat16 &&
      cpu_kernels().bfloat16_products) {
    return multiply_plain(x_argument, args, bias_argument, outputs);
  }
  const bool by_gemm =
      is_bfloat16 && !few && args.type == PanelType::kBFloat16 && cpu_kernels().gemm;
  const auto x = (by_gemm ? x_argument : x_argument.to(at::kFloat)).contiguous();
  auto shape = x.sizes().vec();
  shape.back() = outputs;
  auto out = at::empty({tokens, padded}, x.options().dtype(at::kFloat));
  if (bias_argument) bias = padded_floats(*bias_argument, padded);
  args.x = by_gemm ? nullptr : x.const_data_ptr<float>();
  args.bias = bias.defined() ? bias.const_data_ptr<float>() : nullptr;
  args.out = out.mutable_data_ptr<float>();
  args.out_stride = padded;
  if (by_gemm) {
    multiply_bfloat16(args, x.const_data_ptr<at::BFloat16>());
    if (bias_argument) out.add_(bias);
  } else if (!few) {
    multiply_many(args);
  } else if (tokens > 0) {
    multiply_few(args);
  }
  return out.narrow(1, 0, outputs).to(dtype).contiguous().view(shape);
}

TORCH_LIBRARY_IMPL(h2o_prefill, CPU, m) { m.impl("linear", &linear_cpu); }

}  // namespace
}  // namespace h2o_prefill
