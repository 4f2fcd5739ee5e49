#include "h2o_prefill/session_file.h"

#include <ATen/MapAllocator.h>
#include <ATen/ops/from_blob.h>
#include <ATen/ops/isfinite.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <sstream>
#include <system_error>
#include <utility>
#include <vector>

#include "common/atomic_file.h"
#include "common/checks.h"
#include "common/checksum.h"
#include "common/rules.h"
#include "core/safetensors.h"
#include "h2o_prefill/memory_set_tracker.h"

namespace h2o_prefill {
namespace {

namespace fs = std::filesystem;

// Version 1 had no checksum.
constexpr int64_t kVersion = 2;
constexpr std::string_view kKey = "h2o_prefill.session";
const std::string kNoChecksum(16, '0');  // in the header that the checksum is made of

// "float32", as the metadata has it. Keys of other dtypes have no kernels.
std::string name_of(at::ScalarType dtype) {
  TORCH_CHECK_VALUE(at::isFloatingType(dtype) && !safetensors::code_of(dtype).empty(),
                    "keys must be float32, bfloat16, float16 or float64, got ", dtype_name(dtype));
  return dtype_name(dtype);
}

constexpr int64_t kAnySize = -1;

// Tensors of a session that have not been checked.
class Expected {
 public:
  explicit Expected(const SessionFile& session) : left_(session.tensors) {}

  bool has(const std::string& name) const { return left_.count(name) > 0; }

  at::Tensor take(const std::string& name, at::ScalarType dtype,
                  const std::vector<int64_t>& sizes) {
    const auto found = left_.find(name);
    TORCH_CHECK_VALUE(found != left_.end(), name, " must be there");
    const at::Tensor tensor = found->second;
    left_.erase(found);
    bool same = tensor.scalar_type() == dtype && tensor.dim() == std::ssize(sizes);
    for (size_t i = 0; same && i < sizes.size(); ++i) {
      same = sizes[i] == kAnySize || sizes[i] == tensor.size(static_cast<int64_t>(i));
    }
    TORCH_CHECK_VALUE(same, name, " must be ", dtype_name(dtype), " ", at::IntArrayRef(sizes),
                      ", -1 any size, got ", describe(tensor));
    return tensor;
  }

  size_t left() const { return left_.size(); }

  void check_end() const {
    TORCH_CHECK_VALUE(left_.empty(), left_.begin()->first, " must not be there");
  }

 private:
  std::map<std::string, at::Tensor> left_;
};

// Everything but the numbers in keys and values. The state of a layer is checked as the tracker
// takes it.
void check_session(const SessionFile& session) {
  check_at_least("length", session.length, 1);
  Expected expected(session);
  const auto begins = expected.take("last_chunk_begin", at::kLong, {kAnySize});
  // Every layer has keys and values, so a file cannot name more of them than it holds.
  const int64_t layers = begins.size(0);
  TORCH_CHECK_VALUE(layers >= 1 && layers <= static_cast<int64_t>(expected.left() / 2),
                    "last_chunk_begin must be of all layers, got ", layers);
  const auto config = PrefillConfig::parse(session.settings);
  MemorySetTracker tracker(layers, config);
  const auto first = session.tensors.find(session_prefix(0) + "key");
  TORCH_CHECK_VALUE(first != session.tensors.end(), "layers.0.key must be there");
  const at::ScalarType dtype = first->second.scalar_type();
  name_of(dtype);
  int64_t batch = kAnySize;
  for (int64_t layer = 0; layer < layers; ++layer) {
    const std::string prefix = session_prefix(layer);
    const auto key = expected.take(prefix + "key", dtype, {batch, kAnySize, kAnySize, kAnySize});
    batch = key.size(0);
    const int64_t rows = key.size(2);
    const auto value = expected.take(prefix + "value", dtype, {batch, key.size(1), rows, kAnySize});
    TORCH_CHECK_VALUE(key.numel() > 0 && value.numel() > 0 && rows <= session.length, prefix,
                      "key and value must have 1 to ", session.length, " tokens, got ",
                      key.sizes());
    const int64_t begin = begins[layer].item<int64_t>();
    if (!expected.has(prefix + "scores") && !expected.has(prefix + "memory")) {
      TORCH_CHECK_VALUE(begin == 0, "last_chunk_begin of layer ", layer, " must be 0, got ", begin);
      continue;
    }
    const auto wide = dtype == at::kDouble ? at::kDouble : at::kFloat;
    const auto scores = expected.take(prefix + "scores", wide, {batch, kAnySize, session.length});
    const int64_t heads = scores.size(1);
    const auto memory = expected.take(prefix + "memory", at::kInt, {batch, heads, kAnySize});
    const auto errors = expected.take(prefix + "errors", at::kFloat, {batch, heads, kErrorFields});
    TORCH_CHECK_VALUE(
        heads > 0 && at::isfinite(scores).all().item<bool>() && scores.min().item<double>() >= 0,
        "scores of layer ", layer, " must be finite and >= 0");
    tracker.update(
        layer, {.scores = scores, .memory = memory, .last_chunk_begin = begin, .errors = errors});
    if (!expected.has(prefix + "checkpoint_memory")) continue;
    const auto sets =
        expected.take(prefix + "checkpoint_memory", at::kInt, {kAnySize, batch, heads, kAnySize});
    const int64_t count = sets.size(0), width = sets.size(3);
    const auto kept =
        expected.take(prefix + "checkpoint_scores", wide, {count, batch, heads, width});
    expected.take(prefix + "checkpoint_errors", at::kFloat, {count, batch, heads, kErrorFields});
    TORCH_CHECK_VALUE(count * config.chunk_size <= session.length &&
                          width <= tracker.memory_size(layer) &&
                          at::isfinite(kept).all().item<bool>(),
                      "checkpoints of layer ", layer, " must be finite, of chunks of the text");
    for (int64_t i = 0; i < count; ++i) {
      check_memory_sets("checkpoint_memory", sets[i], kept[i], (i + 1) * config.chunk_size);
    }
  }
  if (expected.has("token_ids")) expected.take("token_ids", at::kLong, {batch, session.length});
  expected.check_end();
}

std::string metadata_of(const SessionFile& session, const std::string& sum) {
  using safetensors::to_json;
  const auto& key = session.tensors.at(session_prefix(0) + "key");
  return c10::str(R"({"version":)", kVersion, R"(,"checksum":)", to_json(sum), R"(,"model":)",
                  to_json(session.model), R"(,"settings":)", to_json(session.settings),
                  R"(,"dtype":)", to_json(name_of(key.scalar_type())), R"(,"length":)",
                  session.length, "}");
}

// Where in the text of a header the checksum is: quotes inside of metadata are escaped.
size_t place_of_checksum(std::string_view header) {
  const std::string sought = R"(\"checksum\":\")";
  return header.find(sought) + sought.size();
}

// The value of "name=" among words that blanks separate; "none" if there is none.
std::string value_of(const std::string& words, const std::string& name) {
  std::istringstream stream(words);
  for (std::string word; stream >> word;) {
    if (word.starts_with(name + "=")) return word.substr(name.size() + 1);
  }
  return "none";
}

}  // namespace

void SessionFile::check_model(const std::string& wanted) const {
  if (model == wanted) return;
  const bool has_words = model.find('=') < model.size() && wanted.find('=') < wanted.size();
  std::istringstream words(has_words ? wanted + " " + model : "");
  for (std::string word; words >> word;) {
    const std::string name = word.substr(0, word.find('='));
    const std::string here = value_of(wanted, name), there = value_of(model, name);
    TORCH_CHECK_VALUE(here == there, "session must be of this model: ", name, " must be ", here,
                      ", got ", there);
  }
  TORCH_CHECK_VALUE(false, "session must be of the model ", wanted, ", got one of ", model);
}

void SessionFile::check_settings(const PrefillConfig& wanted) const {
  const auto here = PrefillConfig::parse(settings);
  TORCH_CHECK_VALUE(here.matches(wanted), "session must have the settings ", wanted.to_string(),
                    ", got ", here.to_string());
}

void SessionFile::check(const std::string& wanted_model, const PrefillConfig& wanted_settings,
                        int64_t layers, int64_t max_tokens) const {
  check_model(wanted_model);
  check_settings(wanted_settings);
  const int64_t held = tensors.at("last_chunk_begin").size(0);
  TORCH_CHECK_VALUE(held == layers && length <= max_tokens, "session must have ", layers,
                    " layers and at most ", max_tokens, " tokens, got ", held, " and ", length);
}

std::string session_prefix(int64_t layer) { return c10::str("layers.", layer, "."); }

void write_session_file(const std::string& path, const SessionFile& session) {
  check_session(session);
  const std::vector<safetensors::Entry> entries = safetensors::layout(session.tensors);
  const std::string header =
      safetensors::to_text({std::string(kKey), metadata_of(session, kNoChecksum), entries});
  AtomicFile file(path);
  const uint64_t bytes = header.size();
  file.write(&bytes, sizeof bytes);
  file.write(header.data(), header.size());
  uint64_t sum = checksum(header.data(), header.size());
  for (const auto& entry : entries) {
    const auto tensor = session.tensors.at(entry.name).detach().cpu().contiguous();
    sum = combined_checksum(sum, checksum(tensor.const_data_ptr(), tensor.nbytes()));
    file.write(tensor.const_data_ptr(), tensor.nbytes());
  }
  const std::string digits = hexadecimal(sum);
  file.overwrite(static_cast<int64_t>(sizeof bytes + place_of_checksum(header)), digits.data(),
                 digits.size());
  file.commit();
}

SessionFile read_session_file(const std::string& path, bool verify) try {
  std::error_code unreadable;
  TORCH_CHECK_VALUE(path.find('\0') == std::string::npos, "a path must have no null byte");
  TORCH_CHECK_VALUE(!fs::is_directory(path, unreadable), "it is a folder");
  const uint64_t size = fs::file_size(path, unreadable);
  errno = unreadable.value();
  if (unreadable || !std::ifstream(path)) throw_errno("read", path);
  TORCH_CHECK_VALUE(size > sizeof(uint64_t), "it is no session file");
  size_t mapped = 0;
  const auto data = std::make_shared<at::DataPtr>(
      at::MapAllocator::makeDataPtr(path, /*flags=*/0, size, &mapped));
  char* const file = static_cast<char*>(data->get());
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, file, sizeof header_bytes);
  TORCH_CHECK_VALUE(header_bytes <= size - sizeof header_bytes,
                    "it is no session file, or was cut");
  std::string text(file + sizeof header_bytes, header_bytes);
  char* const first = file + sizeof header_bytes + header_bytes;
  const safetensors::Header header =
      safetensors::parse(text, size - sizeof header_bytes - header_bytes);
  TORCH_CHECK_VALUE(header.key == kKey, "it is no session file");

  SessionFile session;
  safetensors::Reader reader(header.value);
  reader.expect(R"({"version":)");
  const int64_t version = reader.integer();
  TORCH_CHECK_VALUE(version == kVersion, "its version must be ", kVersion, ", got ", version);
  reader.expect(R"(,"checksum":)");
  const std::string sum = reader.string();
  reader.expect(R"(,"model":)");
  session.model = reader.string();
  reader.expect(R"(,"settings":)");
  session.settings = reader.string();
  reader.expect(R"(,"dtype":)");
  const std::string dtype = reader.string();
  reader.expect(R"(,"length":)");
  session.length = reader.integer();
  reader.expect("}");

  if (verify) text.replace(place_of_checksum(text), kNoChecksum.size(), kNoChecksum);
  uint64_t found = checksum(text.data(), text.size());
  for (const auto& entry : header.entries) {
    auto tensor = at::for_blob(first + entry.begin, entry.shape)
                      .deleter([data](void*) {})
                      .options(at::TensorOptions(entry.dtype))
                      .make_tensor();
    if (verify) {
      found = combined_checksum(found, checksum(tensor.const_data_ptr(), tensor.nbytes()));
    }
    TORCH_CHECK_VALUE(session.tensors.emplace(entry.name, std::move(tensor)).second, entry.name,
                      " must be there once");
  }
  TORCH_CHECK_VALUE(!verify || sum == hexadecimal(found), "it was changed: its checksum must be ",
                    sum, ", got ", hexadecimal(found));
  check_session(session);
  TORCH_CHECK_VALUE(header.value == metadata_of(session, sum),
                    "its metadata must be of its tensors");
  return session;
} catch (const c10::ValueError& error) {
  refuse_session(path, error);
}

}  // namespace h2o_prefill
