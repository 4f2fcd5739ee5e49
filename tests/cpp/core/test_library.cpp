#include "h2o_prefill/library.h"

#include <algorithm>
#include <cctype>

#include "kernels/cpu/cpu_features.h"
#include "testing.h"

namespace h2o_prefill::testing {
namespace {

TEST(Library, InitMayBeCalledTwice) {
  init();
  init();
}

TEST(Library, VersionIsTheProjects) { EXPECT_EQ(version(), H2O_EXPECTED_VERSION); }

TEST(Library, FeaturesOfTheCpuHoldThoseOfItsKernels) {
  const std::string features = cpu_features() + " ";
  for (const char* isa : {"avx2", "avx512", "avx512_bf16"}) {
    std::string name = isa;
    std::ranges::transform(name, name.begin(), [](unsigned char c) { return std::toupper(c); });
    EXPECT_EQ(features.find(" " + name + " ") != std::string::npos, cpu_has(isa)) << features;
  }
}

// The CPUs that are known, whichever this is.
static_assert(has_fast_bfloat16_products({"AuthenticAMD", 0x19}));   // Zen 4
static_assert(has_fast_bfloat16_products({"AuthenticAMD", 0x1A}));   // Zen 5
static_assert(!has_fast_bfloat16_products({"AuthenticAMD", 0x17}));  // Zen 2
static_assert(!has_fast_bfloat16_products({"GenuineIntel", 0x06}));

}  // namespace
}  // namespace h2o_prefill::testing
