// Compiled once per instruction set.
#include "kernels/cpu/packed_linear.h"

#include "kernels/cpu/row_io.h"
#include "kernels/cpu/tile.h"

namespace h2o_prefill::H2O_ISA {
namespace {

constexpr int64_t kWidth = kPanelOutputs;
constexpr int kVectors = kWidth / kLanes;
static_assert(PackedLinearArgs::kTileOutputs % kPanel == 0, "the panels of tile.h are other ones");

// Inputs that are converted at once, so that a panel and a tile of tokens stay in L1; and tokens
// that meet them, from L2: whole tiles.
constexpr int64_t kDepth = 320;
constexpr int64_t kTokens = 120;
static_assert(kTokens % kTileRows == 0);
static_assert(PackedLinearArgs::kScratchFloats >=
              (PackedLinearArgs::kBlockOutputs + kTokens) * kDepth);

// How weights lie. load(): vector v of the weights of input i, 0 or 1, of two.
template <typename N, Vec (&load_lanes)(const N*)>
struct Rows {
  using Number = N;
  static H2O_INLINE Vec load(const Number* inputs, int i, int v) {
    return load_lanes(inputs + i * kWidth + v * kLanes);
  }
};

struct BFloat16Pairs {
  using Number = uint16_t;
  static H2O_INLINE Vec load(const Number* inputs, int i, int v) {
    typedef uint32_t Pairs __attribute__((vector_size(kVectorBytes), aligned(2), may_alias));
    const UintVec pairs = *reinterpret_cast<const Pairs*>(inputs + v * 2 * kLanes);
    return reinterpret_cast<Vec>(i == 0 ? pairs << 16 : pairs & 0xFFFF0000U);
  }
};

template <typename Function>
H2O_INLINE void with_rows(PanelType type, const Function& f) {
  if (type == PanelType::kBFloat16) return f(BFloat16Pairs{});
  if (type == PanelType::kFloat16) return f(Rows<uint16_t, load_float16>{});
  f(Rows<int8_t, load_int8>{});
}

// The weights of a panel from an even input on.
template <typename Layout>
H2O_INLINE const typename Layout::Number* weights_at(const PackedLinearArgs& args, int64_t panel,
                                                     int64_t input) {
  return static_cast<const typename Layout::Number*>(args.panels) +
         (panel * args.inputs + input) * kWidth;
}

// Panels that kN tokens meet at once: memory is read faster in two streams, and each token is
// broadcast once for both.
template <int kN>
constexpr int kPanelsAtOnce = kVectors == 1 || kN <= 2 ? 2 : 1;

// Panels first and, of two, first + distance of kN tokens.
template <typename Layout, int kN, int kPanels>
void multiply_panels(const PackedLinearArgs& args, int64_t first, int64_t distance) {
  constexpr int kVecs = kPanels * kVectors;
  // As many sums as hide the latency of additions, in one order for one and two panels.
  constexpr int kWays = kN * kPanelsAtOnce<kN> * kVectors >= 8 ? 1 : 2;
  constexpr int64_t kAhead = 4096;  // bytes
  Vec sums[kWays][kN][kVecs] = {};
  const int64_t apart = distance * args.inputs * kWidth;
  const auto* weights = weights_at<Layout>(args, first, 0);
  const float* x = args.x;
  for (const float* const end = x + args.inputs; x != end; x += 2, weights += 2 * kWidth) {
    for (int p = 0; p < kPanels; ++p)
      __builtin_prefetch(reinterpret_cast<const char*>(weights + p * apart) + kAhead);
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      Vec w[kVecs];
#pragma GCC unroll 8
      for (int v = 0; v < kVecs; ++v)
        w[v] = Layout::load(weights + v / kVectors * apart, i, v % kVectors);
#pragma GCC unroll 6
      for (int t = 0; t < kN; ++t) {
        const Vec token = broadcast(x[t * args.inputs + i]);
#pragma GCC unroll 8
        for (int v = 0; v < kVecs; ++v) {
          Vec& sum = sums[i % kWays][t][v];
          sum = token * w[v] + sum;
        }
        keep_register(token);  // else GCC lets it become a sum, and keeps another in memory
      }
    }
  }
  for (int t = 0; t < kN; ++t) {
    for (int v = 0; v < kVecs; ++v) {
      Vec total = sums[0][t][v];
      for (int way = 1; way < kWays; ++way) total += sums[way][t][v];
      const int64_t output = (first + v / kVectors * distance) * kWidth + v % kVectors * kLanes;
      if (args.scales) total *= load(args.scales + output);
      if (args.bias) total += load(args.bias + output);
      store(args.out + t * args.out_stride + output, total);
    }
  }
}

template <typename Layout, int kN>
void multiply_tokens(const PackedLinearArgs& args, int64_t begin, int64_t end) {
  constexpr int kPanels = kPanelsAtOnce<kN>;
  const int64_t each = (end - begin) / kPanels;
  for (int64_t i = 0; i < each; ++i) multiply_panels<Layout, kN, kPanels>(args, begin + i, each);
  for (int64_t panel = begin + kPanels * each; panel < end; ++panel)
    multiply_panels<Layout, kN, 1>(args, panel, 0);
}

void multiply_few(const PackedLinearArgs& args, int64_t begin, int64_t end) {
  with_rows(args.type, [&](auto layout) {
    using Layout = decltype(layout);
    constexpr void (*kByTokens[])(const PackedLinearArgs&, int64_t, int64_t) = {
        multiply_tokens<Layout, 1>, multiply_tokens<Layout, 2>, multiply_tokens<Layout, 3>,
        multiply_tokens<Layout, 4>, multiply_tokens<Layout, 5>, multiply_tokens<Layout, 6>};
    static_assert(sizeof(kByTokens) / sizeof(*kByTokens) == PackedLinearArgs::kFewTokens);
    kByTokens[args.tokens - 1](args, begin, end);
  });
}

// Inputs [input, input + depth) of a panel, as panels of tile.h have them; of a panel that there is
// not, zeros. `column`: of the first output, in the block.
template <typename Layout>
void convert_panel(const PackedLinearArgs& args, int64_t panel, int64_t input, int64_t depth,
                   int64_t column, float* block) {
  const bool exists = panel < args.num_panels;
  const auto* weights = weights_at<Layout>(args, panel, input);
  float* to[kVectors];
  Vec scale[kVectors];
  for (int v = 0; v < kVectors; ++v) {
    const int64_t place = column + v * kLanes;
    to[v] = block + place / kPanel * depth * kPanel + place % kPanel;
    scale[v] =
        !exists ? Vec{}
                : (args.scales ? load(args.scales + panel * kWidth + v * kLanes) : broadcast(1.0F));
  }
  for (int64_t k = 0; k < depth; k += 2) {
    for (int v = 0; v < kVectors; ++v) {
#pragma GCC unroll 2
      for (int i = 0; i < 2; ++i) {
        const Vec w = exists ? Layout::load(weights + k * kWidth, i, v) : Vec{};
        store(to[v] + (k + i) * kPanel, w * scale[v]);
      }
    }
  }
}

void multiply_many(const PackedLinearArgs& args, int64_t begin, int64_t end, float* scratch) {
  float* const block = scratch;
  float* const rows = scratch + PackedLinearArgs::kBlockOutputs * kDepth;
  // Parts of nearly the same size, each an even number of inputs.
  const int64_t part = round_up(divide_up(args.inputs, divide_up(args.inputs, kDepth)), int64_t{2});
  for (int64_t input = 0; input < args.inputs; input += part) {
    const int64_t depth = args.inputs - input < part ? args.inputs - input : part;
    with_rows(args.type, [&](auto kind) {
      for (int64_t o = begin; o < end; o += kWidth)
        convert_panel<decltype(kind)>(args, o / kWidth, input, depth, o - begin, block);
    });
    for (int64_t first = 0; first < args.tokens; first += kTokens) {
      const int n = static_cast<int>(args.tokens - first < kTokens ? args.tokens - first : kTokens);
      // Layout of their own: rows of x may share cache sets.
      for (int t = 0; t < n; ++t) {
        const float* const x = args.x + (first + t) * args.inputs + input;
        for (int64_t k = 0; k < depth; ++k) rows[t * depth + k] = x[k];
      }
      for (int64_t o = begin; o < end; o += kPanel) {
        float* const out = args.out + first * args.out_stride + o;
        const float* const weights = block + (o - begin) * depth;
        if (input == 0 && !args.bias) {
          multiply_rows<Float32Products, /*kAccumulate=*/false>(rows, depth, n, RowEnds{}, weights,
                                                                depth, out, args.out_stride);
          continue;
        }
        for (int t = 0; input == 0 && t < n; ++t) {
          for (int64_t i = 0; i < kPanel; ++i) out[t * args.out_stride + i] = args.bias[o + i];
        }
        multiply_rows<Float32Products, /*kAccumulate=*/true>(rows, depth, n, RowEnds{}, weights,
                                                             depth, out, args.out_stride);
      }
    }
  }
}

// Two numbers of each lane as bfloat16, rounded to nearest, ties to even; a NaN stays one.
H2O_INLINE UintVec round_pairs(Vec first, Vec second) {
  const auto round = [](UintVec bits) { return bits + 0x7FFFU + (bits >> 16 & 1U); };
  const UintVec low = round(reinterpret_cast<UintVec>(first)) >> 16;
  return low | (round(reinterpret_cast<UintVec>(second)) & 0xFFFF0000U);
}

void unpack(const PackedLinearArgs& args, int64_t begin, int64_t end, uint16_t* weights) {
  typedef uint32_t Pair __attribute__((aligned(2), may_alias));  // of inputs
  // So many at once: what is read of them stays in L1, and a row gets whole cache lines.
  constexpr int64_t kPairs = 64;
  const int64_t all_pairs = args.inputs / 2;
  for (int64_t panel = begin; panel < end; ++panel) {
    for (int64_t pair = 0; pair < all_pairs; pair += kPairs) {
      const int64_t count = all_pairs - pair < kPairs ? all_pairs - pair : kPairs;
      UintVec scaled[kPairs * kVectors];
      const Pair* from = reinterpret_cast<const Pair*>(scaled);
      if (args.type == PanelType::kBFloat16) {
        from = reinterpret_cast<const Pair*>(weights_at<BFloat16Pairs>(args, panel, 2 * pair));
      } else {
        using Int8 = Rows<int8_t, load_int8>;
        const int8_t* both = weights_at<Int8>(args, panel, 2 * pair);
        for (int64_t k = 0; k < count; ++k, both += 2 * kWidth) {
          for (int v = 0; v < kVectors; ++v) {
            const Vec scales = load(args.scales + panel * kWidth + v * kLanes);
            scaled[k * kVectors + v] =
                round_pairs(Int8::load(both, 0, v) * scales, Int8::load(both, 1, v) * scales);
          }
        }
      }
      Pair* const rows = reinterpret_cast<Pair*>(weights + panel * kWidth * args.inputs) + pair;
      for (int64_t o = 0; o < kWidth; ++o) {
        for (int64_t k = 0; k < count; ++k) rows[o * all_pairs + k] = from[k * kWidth + o];
      }
    }
  }
}

}  // namespace

extern const PackedLinearKernels kPackedLinearKernels;
const PackedLinearKernels kPackedLinearKernels = {multiply_few, multiply_many, unpack};

}  // namespace h2o_prefill::H2O_ISA
