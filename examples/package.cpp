#include "package.h"

#include <ATen/ATen.h>
#include <h2o_prefill/library.h>
#include <h2o_prefill/ops.h>
#include <sys/utsname.h>
#include <torch/version.h>

#include <exception>
#include <filesystem>
#include <sstream>
#include <unordered_map>

#include "errors.h"
#include "text_tasks.h"

namespace examples {
namespace {

using Metadata = std::unordered_map<std::string, std::string>;
using torch::inductor::AOTIModelPackageLoader;

Metadata read_metadata(const std::string& path) {
  if (!std::filesystem::is_regular_file(path)) fail("there is no package ", path);
  Metadata metadata;
  try {
    metadata = AOTIModelPackageLoader::load_metadata_from_package(path, "model");
  } catch (const std::exception&) {
  }
  if (!metadata.contains("h2o_prefill.settings")) {
    fail(path, " is no package that `h2o-prefill export` wrote");
  }
  return metadata;
}

// Compiled code does not check where it runs.
void check_machine(const Metadata& metadata) {
  const std::string& written = metadata.at("h2o_prefill.torch");
  const std::string here =
      std::to_string(TORCH_VERSION_MAJOR) + "." + std::to_string(TORCH_VERSION_MINOR) + ".";
  if (!written.starts_with(here)) {
    fail("the package was written by PyTorch ", written, " and this program runs ", TORCH_VERSION,
         ": export the model again");
  }
  utsname system{};
  uname(&system);
  const auto machine = metadata.find("AOTI_MACHINE");
  if (machine != metadata.end() && machine->second != system.machine) {
    fail("the package is for ", machine->second, " machines, and this is a ", system.machine,
         ": export the model on a machine like this one");
  }
}

at::ScalarType dtype_of(const std::string& name) {
  if (name == "bfloat16") return at::kBFloat16;
  return name == "float16" ? at::kHalf : at::kFloat;
}

PackageInfo read_info(const Metadata& metadata) {
  const auto text = [&](const char* name) {
    return metadata.at(std::string("h2o_prefill.") + name);
  };
  const auto number = [&](const char* name) { return std::stoll(text(name)); };
  PackageInfo info{.model = text("model"),
                   .settings = h2o_prefill::PrefillConfig::parse(text("settings")),
                   .dtype = dtype_of(text("dtype")),
                   .capacity = number("capacity"),
                   .vocabulary = number("vocabulary"),
                   .layers = number("layers"),
                   .kv_heads = number("kv_heads"),
                   .head_dim = number("head_dim"),
                   .end_ids = {}};
  std::istringstream ids(text("end_ids"));
  for (std::string id; std::getline(ids, id, ',');) info.end_ids.push_back(std::stoll(id));
  return info;
}

}  // namespace

Package::Package(const std::string& path) {
  // A package names the operators by text: this makes sure that they are registered.
  h2o_prefill::init();
  const Metadata metadata = read_metadata(path);
  check_machine(metadata);
  info_ = read_info(metadata);
  loader_ = std::make_unique<AOTIModelPackageLoader>(path);

  position_ = at::zeros({2}, at::kLong);
  state_ = {at::zeros({1, info_.capacity}, at::kLong), position_};
  const std::vector<int64_t> rows{1, info_.kv_heads, info_.capacity};
  for (int64_t layer = 0; layer < info_.layers; ++layer) {
    for (int i = 0; i < 2; ++i) {
      state_.push_back(at::zeros({1, info_.kv_heads, info_.capacity, info_.head_dim}, info_.dtype));
    }
    state_.push_back(at::zeros(rows, at::kFloat));
    state_.push_back(
        at::full({1, info_.kv_heads, info_.settings.of_layer(layer).memory_size()}, -1, at::kInt));
    state_.push_back(at::zeros({1, info_.kv_heads, h2o_prefill::kErrorFields}));
  }
}

int64_t Package::length() const { return position_.const_data_ptr<int64_t>()[0]; }

void Package::reset() { position_.zero_(); }

void Package::check(const at::Tensor& token_ids) const {
  check_token_ids(token_ids, info_.vocabulary);
  const int64_t tokens = token_ids.size(1);
  if (tokens > info_.capacity - length()) {
    fail("no room for ", tokens, " tokens after ", length(), ": the package has a capacity of ",
         info_.capacity, " (h2o-prefill export --capacity)");
  }
}

at::Tensor Package::forward(const at::Tensor& token_ids, Rows rows) {
  check(token_ids);
  const int64_t tokens = token_ids.size(1);
  std::vector<at::Tensor> inputs{token_ids.contiguous(),
                                 at::arange(rows == Rows::kLast ? tokens - 1 : 0, tokens)};
  inputs.insert(inputs.end(), state_.begin(), state_.end());
  return loader_->run(inputs).at(0);
}

at::Tensor Package::forward_densely(const at::Tensor& token_ids, Rows rows) {
  const int64_t most = info_.settings.sparse_from() - 1;
  if (most < 1) fail("every call of this package is sparse: its min_prefill is 1");
  check(token_ids);
  std::vector<at::Tensor> logits;
  for (const at::Tensor& part : token_ids.split(most, 1)) logits.push_back(forward(part, rows));
  return rows == Rows::kLast ? logits.back() : at::cat(logits);
}

}  // namespace examples
