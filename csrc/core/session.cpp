#include "core/session.h"

#include <ATen/ops/empty.h>
#include <caffe2/serialize/crc_alt.h>
#include <caffe2/serialize/inline_container.h>
#include <torch/csrc/jit/serialization/import_read.h>
#include <torch/csrc/jit/serialization/pickler.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <map>
#include <random>
#include <sstream>

#include "common/rules.h"

namespace h2o_prefill {
namespace {

namespace fs = std::filesystem;

constexpr const char* kSessionName = "h2o_prefill.session";
// Versions 1 and 2 were safetensors files.
constexpr int64_t kSessionVersion = 3;
constexpr size_t kSessionFields = 5;  // before the layers

// Writes a file through `write(stream)`, whole or not at all; one that is there keeps its
// permissions.
template <typename Write>
void replace_file(const std::string& path, const Write& write) {
  std::error_code ignored;
  const fs::path target = fs::exists(path, ignored) ? fs::canonical(path, ignored) : fs::path(path);
  fs::path scratch = target;
  scratch += c10::str(".", std::random_device()(), ".part");
  try {
    std::ofstream stream(scratch, std::ios::binary);
    if (!stream) throw_errno("write", path);
    write(stream);
    stream.close();
    if (!stream) throw_errno("write", path);
    if (fs::exists(target)) fs::permissions(scratch, fs::status(target).permissions());
    std::error_code failed;
    fs::rename(scratch, target, failed);
    errno = failed.value();
    if (failed) throw_errno("write", path);
  } catch (...) {
    fs::remove(scratch, ignored);
    throw;
  }
}

// Compares the data of records with their CRC, which follows them: LibTorch's reader does
// not.
void check_records(caffe2::serialize::PyTorchStreamReader& reader, const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::vector<char> buffer(size_t{1} << 20);
  for (const std::string& name : reader.getAllRecords()) {
    if (reader.getRecordSize(name) == 0) continue;  // nothing follows it
    file.seekg(static_cast<std::streamoff>(reader.getRecordOffset(name)));
    uint32_t sum = 0;
    for (size_t left = reader.getRecordSize(name), count = 0; left > 0; left -= count) {
      count = std::min(left, buffer.size());
      file.read(buffer.data(), static_cast<std::streamsize>(count));
      sum = checksum(buffer.data(), count, sum);
    }
    std::array<uint32_t, 2> descriptor{};  // a signature, and the CRC
    file.read(reinterpret_cast<char*>(descriptor.data()), sizeof descriptor);
    TORCH_CHECK(file && descriptor[1] == sum);
  }
}

std::vector<c10::IValue> read_tuple(const std::string& path) {
  if (!std::ifstream(path)) throw_errno("read", path);
  try {
    caffe2::serialize::PyTorchStreamReader reader(path);
    check_records(reader, path);
    auto value =
        torch::jit::readArchiveAndTensors("data", /*pickle_prefix=*/"", /*tensor_prefix=*/"",
                                          std::nullopt, std::nullopt, std::nullopt, reader);
    return std::move(*value.toTuple()).elements();
  } catch (const std::exception&) {
    TORCH_CHECK_VALUE(false, "it is no session file, or is damaged");
  }
}

// The words "name=value" of a fingerprint.
std::map<std::string, std::string> words_of(const std::string& fingerprint) {
  std::map<std::string, std::string> words;
  std::istringstream stream(fingerprint);
  for (std::string word; stream >> word;) {
    if (const auto end = word.find('='); end < word.size()) {
      words[word.substr(0, end)] = word.substr(end + 1);
    }
  }
  return words;
}

void check_fingerprint(const std::string& saved, const std::string& wanted) {
  const auto words = words_of(saved);
  for (const auto& [name, value] : words_of(wanted)) {
    const auto word = words.find(name);
    const std::string got = word == words.end() ? "none" : one_line(word->second);
    TORCH_CHECK_VALUE(got == value, "session must be of this model: ", name, " must be ", value,
                      ", got ", got);
  }
  TORCH_CHECK_VALUE(saved == wanted, "session must be of the model ", wanted, ", got one of ",
                    one_line(saved));
}

}  // namespace

uint32_t checksum(const char* data, size_t size, uint32_t before) {
  return crc32_fast(data, size, before);
}

void Session::write(const std::string& path) const {
  auto tensors = tensors_of({}, layers, {}, /*copies=*/false);
  const auto ids = token_ids.defined() ? token_ids : at::empty({0, 0}, at::kLong);
  tensors.insert(tensors.begin(), ids);
  // The pickle describes tensors as they will be: packed, on the CPU. Memory that nothing writes to
  // takes no room.
  std::vector<c10::IValue> values{kSessionName, kSessionVersion, settings, fingerprint};
  for (const at::Tensor& x : tensors) {
    values.emplace_back(at::empty(x.sizes(), x.options().device(at::kCPU)));
  }
  std::string description;
  torch::jit::Pickler pickler(
      [&](const char* data, size_t size) { description.append(data, size); });
  pickler.protocol();
  pickler.pushIValue(c10::ivalue::Tuple::create(std::move(values)));
  pickler.stop();
  replace_file(path, [&](std::ostream& stream) {
    caffe2::serialize::PyTorchStreamWriter writer([&](const void* data, size_t size) {
      stream.write(static_cast<const char*>(data), static_cast<std::streamsize>(size));
      return stream ? size : 0;
    });
    writer.writeRecord("data.pkl", description.data(), description.size());
    for (size_t i = 0; i < tensors.size(); ++i) {
      const auto packed = tensors[i].detach().cpu().contiguous();
      writer.writeRecord("data/" + std::to_string(i), packed.const_data_ptr(), packed.nbytes());
    }
    writer.writeEndOfFile();
  });
}

Session Session::read(const std::string& path, const std::string& fingerprint,
                      const PrefillConfig& settings, int64_t layers, int64_t max_tokens) try {
  const auto values = read_tuple(path);
  TORCH_CHECK_VALUE(values.size() >= 2 && values[0].isString() &&
                        values[0].toStringRef() == kSessionName && values[1].isInt(),
                    "it is no session file");
  TORCH_CHECK_VALUE(values[1].toInt() == kSessionVersion, "its version must be ", kSessionVersion,
                    ", got ", values[1].toInt());
  TORCH_CHECK_VALUE(values.size() > kSessionFields && values[2].isString() &&
                        values[3].isString() &&
                        std::all_of(values.begin() + 4, values.end(),
                                    [](const auto& value) { return value.isTensor(); }),
                    "it must hold settings, a fingerprint and tensors");
  Session session{.settings = values[2].toStringRef(), .fingerprint = values[3].toStringRef()};
  check_fingerprint(session.fingerprint, fingerprint);
  const auto saved = PrefillConfig::parse(session.settings);
  TORCH_CHECK_VALUE(saved.matches(settings), "session must have the settings ",
                    settings.to_string(), ", got ", saved.to_string());
  std::vector<at::Tensor> tensors;
  for (size_t i = kSessionFields; i < values.size(); ++i) tensors.push_back(values[i].toTensor());
  StateReader state(tensors, /*fields=*/0, /*record_fields=*/1);
  session.layers = layers_of(state);
  const int64_t length = session.length(), count = std::ssize(session.layers);
  TORCH_CHECK_VALUE(count == layers && length <= max_tokens, "session must have ", layers,
                    " layers and at most ", max_tokens, " tokens, got ", count, " and ", length);
  for (const auto& layer : session.layers) {
    TORCH_CHECK_VALUE(layer->length() == length && layer->key().defined() &&
                          layer->scored() <= length && length > 0,
                      "session must have the keys of all ", length, " tokens");
  }
  const at::Tensor ids = values[4].toTensor();
  if (ids.numel() == 0) return session;
  const std::vector<int64_t> sizes{session.layers[0]->key().size(0), length};
  TORCH_CHECK_VALUE(ids.sizes() == sizes && ids.scalar_type() == at::kLong,
                    "token ids must be int64 ", at::IntArrayRef(sizes), ", got ", describe(ids));
  session.token_ids = ids;
  return session;
} catch (const c10::ValueError& error) {
  const std::string line = error.what_without_backtrace();
  TORCH_CHECK_VALUE(false, "session '", one_line(path), "' cannot be read: ", line);
}

}  // namespace h2o_prefill
