// What this CPU can do at most: multiply-adds, bf16 dot products, memory traffic. Timed by the
// caller; every function here only works.
#include <cstdint>
#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace {

// Independent accumulators: enough to hide the latency of 4 cycles, few enough for the registers.
#if defined(__x86_64__)
constexpr int kAccumulators = 12;  // 2 instructions a cycle, 16 registers
#else
constexpr int kAccumulators = 24;  // up to 4 instructions a cycle, 32 registers
#endif

struct Arithmetic {
  const char* name;
  bool (*supported)();
  double flops_per_iteration;
  float (*run)(int64_t iterations);
};

// Small, so that sums stay finite; read at run time, so that nothing is computed in advance.
volatile float factor = 1e-3F;

// The loop of every kind. Each step is accumulator += x * y with the vector type of one
// instruction set.
#define H2O_PEAK_LOOP(vector, zero, step, x, y)                                    \
  vector accumulators[kAccumulators];                                              \
  for (vector& a : accumulators) a = zero;                                         \
  for (int64_t i = 0; i < iterations; ++i) {                                       \
    _Pragma("GCC unroll 24") for (vector& a : accumulators) { a = step(x, y, a); } \
  }                                                                                \
  float sum = 0;                                                                   \
  for (const vector& a : accumulators) {                                           \
    float lanes[sizeof(vector) / sizeof(float)];                                   \
    std::memcpy(lanes, &a, sizeof(a));                                             \
    for (float lane : lanes) sum += lane;                                          \
  }                                                                                \
  return sum

#if defined(__x86_64__)

bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
bool has_avx512() { return __builtin_cpu_supports("avx512f"); }
bool has_avx512_bf16() { return has_avx512() && __builtin_cpu_supports("avx512bf16"); }

__attribute__((target("avx512f"))) float run_avx512(int64_t iterations) {
  const __m512 x = _mm512_set1_ps(factor);
  H2O_PEAK_LOOP(__m512, _mm512_setzero_ps(), _mm512_fmadd_ps, x, x);
}

__attribute__((target("avx2,fma"))) float run_avx2(int64_t iterations) {
  const __m256 x = _mm256_set1_ps(factor);
  H2O_PEAK_LOOP(__m256, _mm256_setzero_ps(), _mm256_fmadd_ps, x, x);
}

__attribute__((target("avx512f,avx512bf16"))) float run_avx512_bf16(int64_t iterations) {
  const __m512 x = _mm512_set1_ps(factor);
  const __m512bh pairs = _mm512_cvtne2ps_pbh(x, x);
#define H2O_DOT(x, y, a) _mm512_dpbf16_ps(a, x, y)
  H2O_PEAK_LOOP(__m512, _mm512_setzero_ps(), H2O_DOT, pairs, pairs);
}

// A bf16 dot product adds two products to every float.
constexpr Arithmetic kKinds[] = {
    {"fma_avx512", has_avx512, kAccumulators * 16 * 2.0, run_avx512},
    {"fma_avx2", has_avx2, kAccumulators * 8 * 2.0, run_avx2},
    {"bf16_dot_avx512", has_avx512_bf16, kAccumulators * 16 * 4.0, run_avx512_bf16},
};

#else

using Vector = float __attribute__((vector_size(16)));

bool always() { return true; }

float run_baseline(int64_t iterations) {
  const float f = factor;
  const Vector x = {f, f, f, f};
#define H2O_MULTIPLY_ADD(x, y, a) ((a) + (x) * (y))
  H2O_PEAK_LOOP(Vector, Vector{}, H2O_MULTIPLY_ADD, x, x);
}

constexpr Arithmetic kKinds[] = {
    {"fma_baseline", always, kAccumulators * 4 * 2.0, run_baseline},
};

#endif

constexpr int kKindCount = sizeof(kKinds) / sizeof(kKinds[0]);

// Part `part` of `parts` of a buffer, in whole cache lines.
struct Range {
  int64_t begin;
  int64_t end;
};

Range range_of(int64_t bytes, int64_t part, int64_t parts) {
  constexpr int64_t kLine = 64;
  const int64_t lines = bytes / kLine;
  return {lines * part / parts * kLine, lines * (part + 1) / parts * kLine};
}

uint64_t read_range(const char* data, int64_t bytes) {
  constexpr int64_t kStreams = 8;
  uint64_t sums[kStreams] = {};
  const auto* words = reinterpret_cast<const uint64_t*>(data);
  for (int64_t i = 0; i < bytes / 8; i += kStreams) {
    for (int64_t s = 0; s < kStreams; ++s) sums[s] ^= words[i + s];
  }
  uint64_t sum = 0;
  for (uint64_t s : sums) sum ^= s;
  return sum;
}

volatile double sink;

}  // namespace

#define H2O_EXPORT extern "C" __attribute__((visibility("default")))

// The name of a kind of arithmetic, widest first; null after the last.
H2O_EXPORT const char* h2o_peak_name(int kind) {
  return kind < kKindCount ? kKinds[kind].name : nullptr;
}

H2O_EXPORT int h2o_peak_supported(int kind) { return kKinds[kind].supported(); }

// Runs the loop on every thread and returns the flops that all did together.
H2O_EXPORT double h2o_peak_run(int kind, int threads, int64_t iterations) {
  double total = 0;
#pragma omp parallel num_threads(threads) reduction(+ : total)
  total += kKinds[kind].run(iterations);
  sink = total;
  return kKinds[kind].flops_per_iteration * static_cast<double>(iterations) * threads;
}

// Reads a buffer once, each thread its part.
H2O_EXPORT void h2o_peak_read(const char* data, int64_t bytes, int threads) {
  uint64_t sum = 0;
#pragma omp parallel for num_threads(threads) reduction(^ : sum)
  for (int part = 0; part < threads; ++part) {
    const Range range = range_of(bytes, part, threads);
    sum ^= read_range(data + range.begin, range.end - range.begin);
  }
  sink = static_cast<double>(sum);
}

// Copies a buffer once, each thread its part.
H2O_EXPORT void h2o_peak_copy(char* to, const char* from, int64_t bytes, int threads) {
#pragma omp parallel for num_threads(threads)
  for (int part = 0; part < threads; ++part) {
    const Range range = range_of(bytes, part, threads);
    std::memcpy(to + range.begin, from + range.begin, range.end - range.begin);
  }
}
