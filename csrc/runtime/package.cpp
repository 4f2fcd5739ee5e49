#include "h2o_prefill/package.h"

#include <ATen/ops/aminmax.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/full.h>
#include <sys/utsname.h>
#include <torch/csrc/inductor/aoti_runner/model_container_runner_cpu.h>
#include <torch/version.h>

#include <charconv>
#include <memory>
#include <optional>
#include <sstream>
#include <string_view>
#include <system_error>
#include <unordered_map>

#include "common/rules.h"
#include "h2o_prefill/library.h"
#include "h2o_prefill/ops.h"
#include "kernels/cpu/cpu_features.h"
#include "runtime/package_files.h"

namespace h2o_prefill {
namespace {

using Metadata = std::unordered_map<std::string, std::string>;
using torch::inductor::AOTIModelContainerRunnerCpu;

[[noreturn]] void refuse_incomplete() {
  TORCH_CHECK_VALUE(false, "the metadata of the package are incomplete: export the model again");
}

const std::string& text_of(const Metadata& metadata, const char* name) {
  const auto entry = metadata.find(name);
  if (entry == metadata.end()) refuse_incomplete();
  return entry->second;
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
  const std::string& machine = text_of(metadata, "machine");
  TORCH_CHECK_VALUE(machine == system.machine, "the package is for ", machine,
                    " machines, and this is a ", system.machine,
                    ": export the model with --machine ", system.machine);
  // Inductor's name of no instruction set is there too.
  const std::string had = " INVALID_VEC_ISA " + cpu_features() + " ";
  std::istringstream names(text_of(metadata, "cpu_features"));
  for (std::string name; names >> name;) {
    TORCH_CHECK_VALUE(had.find(" " + name + " ") != std::string::npos, "the package has code for ",
                      name,
                      ", which this CPU does not have: export the model on a machine like "
                      "this one");
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
  const auto number = [&](const char* name) {
    const int64_t value = number_of(text(name));
    check_at_least(name, value, 1);
    return value;
  };
  PackageInfo info{.model = text("model"),
                   .model_hash = text("model_hash"),
                   .settings = PrefillConfig::parse(text("settings")),
                   .dtype = dtype_of(text("dtype")),
                   .capacity = number("capacity"),
                   .vocabulary = number("vocabulary"),
                   .layers = number("layers"),
                   .kv_heads = number("kv_heads"),
                   .head_dim = number("head_dim"),
                   .end_ids = {},
                   .weights_bytes = number("weights_bytes")};
  std::istringstream ids(text("end_ids"));
  for (std::string id; std::getline(ids, id, ',');) info.end_ids.push_back(number_of(id));
  return info;
}

// The tensors of a state, on the meta device, in the order in which the model takes them.
std::vector<at::Tensor> forms_of(const PackageInfo& info) {
  const auto form = [](at::IntArrayRef sizes, at::ScalarType dtype) {
    return at::empty(sizes, at::TensorOptions(dtype).device(at::kMeta));
  };
  std::vector<at::Tensor> forms{form({1, info.capacity}, at::kLong), form({2}, at::kLong)};
  for (int64_t layer = 0; layer < info.layers; ++layer) {
    for (int i = 0; i < 2; ++i) {
      forms.push_back(form({1, info.kv_heads, info.capacity, info.head_dim}, info.dtype));
    }
    const int64_t memory_size = info.settings.of_layer(layer).memory_size();
    forms.push_back(form({1, info.kv_heads, info.capacity}, at::kFloat));
    forms.push_back(form({1, info.kv_heads, memory_size}, at::kInt));
    forms.push_back(form({1, info.kv_heads, kErrorFields}, at::kFloat));
  }
  return forms;
}

// Zeros that take memory as they are written, or read.
at::Tensor zeros_as_touched(const at::Tensor& form) {
  const auto mapping = std::make_shared<const Mapping>(form.nbytes());
  return at::from_blob(
      mapping->data(), form.sizes(), [mapping](void*) {}, at::TensorOptions(form.scalar_type()));
}

// The code of a package reads tensors by the sizes that it was compiled for.
void check_state(const std::vector<at::Tensor>& state, const std::vector<at::Tensor>& forms) {
  TORCH_CHECK_VALUE(state.size() == forms.size(), "state must have ", forms.size(),
                    " tensors, got ", state.size());
  for (size_t i = 0; i < forms.size(); ++i) {
    const at::Tensor& tensor = state[i];
    TORCH_CHECK_VALUE(tensor.defined() && tensor.layout() == at::kStrided && tensor.is_cpu() &&
                          tensor.is_contiguous() &&
                          tensor.scalar_type() == forms[i].scalar_type() &&
                          tensor.sizes() == forms[i].sizes(),
                      "state must have a contiguous tensor ", i, ", ", forms[i].sizes(), " ",
                      dtype_name(forms[i].scalar_type()), " on cpu, got ", describe(tensor));
  }
}

// An argument of a model: int64 on the CPU.
void check_ints(const char* name, const at::Tensor& t, int64_t dims) {
  check_dims(name, t, dims);
  check_dtype(name, t, at::kLong);
  TORCH_CHECK_VALUE(t.is_cpu(), name, " must be on the CPU, got ", describe(t));
}

}  // namespace

struct Package::Impl {
  explicit Impl(const std::string& path) : files(path) {}

  PackageFiles files;
  PackageInfo info = {};
  std::vector<at::Tensor> forms = {};
  std::optional<AOTIModelContainerRunnerCpu> runner = {};
};

Package::Package(const std::string& path, int64_t concurrency)
    : impl_(std::make_unique<Impl>(path)) {
  check_at_least("concurrency", concurrency, 1);
  // A package names the operators by text: this makes sure that they are registered.
  init();
  const PackageFiles& files = impl_->files;
  check_machine(files.metadata);
  impl_->info = read_info(files.metadata);
  impl_->forms = forms_of(impl_->info);
  files.check_code();
  auto& runner = impl_->runner.emplace(files.code + ".so", concurrency);
  std::unordered_map<std::string, at::Tensor> constants;
  for (const auto& [constant, name] : runner.getConstantNamesToOriginalFQNs()) {
    const auto found = files.weights.find(name);
    if (found == files.weights.end()) refuse_incomplete();
    constants.emplace(constant, found->second);
  }
  runner.update_constant_buffer(constants, /*use_inactive=*/false, /*validate_full_updates=*/true,
                                /*user_managed=*/true);
}

Package::~Package() = default;

const PackageInfo& Package::info() const { return impl_->info; }

const std::unordered_map<std::string, std::string>& Package::metadata() const {
  return impl_->files.metadata;
}

int64_t PackageInfo::bytes_per_token() const {
  const int64_t row = 2 * head_dim * static_cast<int64_t>(c10::elementSize(dtype));
  return layers * kv_heads * (row + int64_t{sizeof(float)}) + int64_t{sizeof(int64_t)};
}

std::vector<at::Tensor> Package::new_state() const {
  std::vector<at::Tensor> state;
  for (const at::Tensor& form : impl_->forms) {
    const auto dtype = form.scalar_type();
    const bool is_memory = dtype == at::kInt;  // small, and not zero
    state.push_back(is_memory ? at::full(form.sizes(), -1, dtype) : zeros_as_touched(form));
  }
  return state;
}

int64_t Package::length(const std::vector<at::Tensor>& state) const {
  check_state(state, impl_->forms);
  const int64_t* const position = state[1].const_data_ptr<int64_t>();
  const auto [length, chunk] = std::pair(position[0], position[1]);
  TORCH_CHECK_VALUE(0 <= chunk && chunk <= length && length <= info().capacity,
                    "position must be [tokens, begin of the last chunk], 0 <= begin <= tokens <= ",
                    info().capacity, ", got [", length, ", ", chunk, "]");
  return length;
}

void Package::check(const at::Tensor& token_ids, int64_t past) const {
  check_ints("token_ids", token_ids, 2);
  TORCH_CHECK_VALUE(token_ids.size(0) == 1 && token_ids.size(1) > 0,
                    "token_ids must be [1, T] with T >= 1, got shape ", token_ids.sizes());
  const auto [lowest, highest] = at::aminmax(token_ids);
  TORCH_CHECK_VALUE(lowest.item<int64_t>() >= 0 && highest.item<int64_t>() < info().vocabulary,
                    "token ids must be in [0, ", info().vocabulary, "), got ",
                    lowest.item<int64_t>() < 0 ? lowest.item<int64_t>() : highest.item<int64_t>(),
                    ": were they made by another tokenizer?");
  TORCH_CHECK_VALUE(token_ids.size(1) <= info().capacity - past, "no room for ", token_ids.size(1),
                    " tokens after ", past, ": the package has a capacity of ", info().capacity,
                    " (h2o-prefill export --capacity)");
}

at::Tensor Package::run(const at::Tensor& token_ids, const at::Tensor& rows,
                        const std::vector<at::Tensor>& state) const {
  check(token_ids, length(state));
  check_ints("rows", rows, 1);
  check_at_least("number of rows", rows.size(0), 1);
  const auto [first, last] = at::aminmax(rows);
  check_index("rows", first.item<int64_t>(), token_ids.size(1));
  check_index("rows", last.item<int64_t>(), token_ids.size(1));
  std::vector<at::Tensor> inputs{token_ids.contiguous(), rows.contiguous()};
  inputs.insert(inputs.end(), state.begin(), state.end());
  return impl_->runner->run(inputs).at(0);
}

}  // namespace h2o_prefill
