#include "h2o_prefill/package.h"

#include <ATen/ops/arange.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <sys/utsname.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/version.h>

#include <charconv>
#include <exception>
#include <filesystem>
#include <sstream>
#include <string_view>
#include <system_error>
#include <unordered_map>

#include "common/rules.h"
#include "h2o_prefill/library.h"
#include "h2o_prefill/ops.h"

namespace h2o_prefill {
namespace {

using Metadata = std::unordered_map<std::string, std::string>;
using torch::inductor::AOTIModelPackageLoader;

constexpr const char* kModel = "model";  // Inductor's name of the model of a package

Metadata read_metadata(const std::string& path) {
  TORCH_CHECK_VALUE(std::filesystem::is_regular_file(path), "there is no package ", path);
  Metadata metadata;
  try {
    metadata = AOTIModelPackageLoader::load_metadata_from_package(path, kModel);
  } catch (const std::exception&) {
  }
  TORCH_CHECK_VALUE(metadata.contains("h2o_prefill.model_hash"), path,
                    " is no package that `h2o-prefill export` wrote");
  return metadata;
}

bool cpu_has(const std::string& feature) {
#if defined(__x86_64__)
  if (feature == "AVX2") return __builtin_cpu_supports("avx2");
  if (feature == "AVX512") return __builtin_cpu_supports("avx512f");
  if (feature == "AVX512_VNNI") return __builtin_cpu_supports("avx512vnni");
#endif
  return true;
}

[[noreturn]] void refuse_incomplete() {
  TORCH_CHECK_VALUE(false, "the metadata of the package are incomplete: export the model again");
}

const std::string& text_of(const Metadata& metadata, const char* name) {
  const auto found = metadata.find(std::string("h2o_prefill.") + name);
  if (found == metadata.end()) refuse_incomplete();
  return found->second;
}

// The whole text must be the number.
int64_t number_of(std::string_view text) {
  int64_t number = 0;
  const char* const end = text.data() + text.size();
  const auto [rest, error] = std::from_chars(text.data(), end, number);
  if (error != std::errc() || rest != end) refuse_incomplete();
  return number;
}

// Compiled code does not check where it runs.
void check_machine(const Metadata& metadata) {
  const std::string& written = text_of(metadata, "torch");
  const std::string here = c10::str(TORCH_VERSION_MAJOR, ".", TORCH_VERSION_MINOR, ".");
  TORCH_CHECK_VALUE(written.starts_with(here), "the package was written by PyTorch ", written,
                    " and this program runs ", TORCH_VERSION, ": export the model again");
  utsname system{};
  uname(&system);
  const auto machine = metadata.find("AOTI_MACHINE");
  TORCH_CHECK_VALUE(machine == metadata.end() || machine->second == system.machine,
                    "the package is for ", machine->second, " machines, and this is a ",
                    system.machine, ": export the model on a machine like this one");
  const auto features = metadata.find("AOTI_CPU_ISA");
  std::istringstream names(features == metadata.end() ? "" : features->second);
  for (std::string name; names >> name;) {
    TORCH_CHECK_VALUE(cpu_has(name), "the package has code for ", name,
                      ", which this CPU does not have: export the model on a machine like this "
                      "one");
  }
}

at::ScalarType dtype_of(const std::string& name) {
  if (name == "bfloat16") return at::kBFloat16;
  if (name == "float16") return at::kHalf;
  TORCH_CHECK_VALUE(name == "float32", "dtype of a package must be float32, bfloat16 or float16, ",
                    "got ", name);
  return at::kFloat;
}

PackageInfo read_info(const Metadata& metadata) {
  const auto text = [&](const char* name) { return text_of(metadata, name); };
  const auto number = [&](const char* name) { return number_of(text(name)); };
  PackageInfo info{.model = text("model"),
                   .model_hash = text("model_hash"),
                   .settings = PrefillConfig::parse(text("settings")),
                   .dtype = dtype_of(text("dtype")),
                   .capacity = number("capacity"),
                   .vocabulary = number("vocabulary"),
                   .layers = number("layers"),
                   .kv_heads = number("kv_heads"),
                   .head_dim = number("head_dim"),
                   .end_ids = {}};
  std::istringstream ids(text("end_ids"));
  for (std::string id; std::getline(ids, id, ',');) info.end_ids.push_back(number_of(id));
  for (const auto& [name, value] :
       {std::pair("capacity", info.capacity), std::pair("vocabulary", info.vocabulary),
        std::pair("layers", info.layers), std::pair("kv_heads", info.kv_heads),
        std::pair("head_dim", info.head_dim)}) {
    check_at_least(name, value, 1);
  }
  return info;
}

}  // namespace

struct Package::Impl {
  PackageInfo info;
  AOTIModelPackageLoader loader;
};

Package::Package(const std::string& path, int64_t concurrency) {
  check_at_least("concurrency", concurrency, 1);
  // A package names the operators by text: this makes sure that they are registered.
  init();
  const Metadata metadata = read_metadata(path);
  check_machine(metadata);
  impl_ = std::unique_ptr<Impl>(
      new Impl{read_info(metadata), AOTIModelPackageLoader(path, kModel, /*run_single_threaded=*/
                                                           false, concurrency)});
}

Package::~Package() = default;

const PackageInfo& Package::info() const { return impl_->info; }

std::vector<at::Tensor> Package::new_state() const {
  const PackageInfo& of = info();
  const std::vector<int64_t> rows{1, of.kv_heads, of.capacity};
  std::vector<at::Tensor> state{at::zeros({1, of.capacity}, at::kLong), at::zeros({2}, at::kLong)};
  for (int64_t layer = 0; layer < of.layers; ++layer) {
    for (int i = 0; i < 2; ++i) {
      state.push_back(at::zeros({1, of.kv_heads, of.capacity, of.head_dim}, of.dtype));
    }
    state.push_back(at::zeros(rows, at::kFloat));
    state.push_back(
        at::full({1, of.kv_heads, of.settings.of_layer(layer).memory_size()}, -1, at::kInt));
    state.push_back(at::zeros({1, of.kv_heads, kErrorFields}));
  }
  return state;
}

at::Tensor Package::run(const at::Tensor& token_ids, const at::Tensor& rows,
                        const std::vector<at::Tensor>& state) const {
  std::vector<at::Tensor> inputs{token_ids.contiguous(), rows};
  inputs.insert(inputs.end(), state.begin(), state.end());
  return impl_->loader.run(inputs).at(0);
}

}  // namespace h2o_prefill
