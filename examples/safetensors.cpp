#include "safetensors.h"

#include <ATen/ATen.h>

#include <array>
#include <bit>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>

#include "errors.h"

namespace examples {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

static_assert(std::endian::native == std::endian::little,
              "the data of safetensors is little-endian");

// Longer headers are refused by the format's own reader too.
constexpr uint64_t kLongestHeader = 100'000'000;

}  // namespace

Safetensors::Safetensors(const fs::path& folder) : folder_(folder) {
  std::set<std::string> files{"model.safetensors"};
  const fs::path index = folder / "model.safetensors.index.json";
  if (fs::exists(index)) {
    std::ifstream in(index, std::ios::binary);
    try {
      const auto map = json::parse(in).at("weight_map").get<std::map<std::string, std::string>>();
      files.clear();
      for (const auto& [name, file] : map) files.insert(file);
    } catch (const json::exception&) {
      fail_damaged(index.string());
    }
  }
  for (const std::string& file : files) {
    if (!fs::is_regular_file(folder / file)) fail("there is no ", (folder / file).string());
    try {
      read_header(folder / file);
    } catch (const json::exception&) {
      fail_damaged((folder / file).string());
    }
  }
}

// The length of the header in 8 bytes, the header, JSON, and the data, to which its offsets refer.
void Safetensors::read_header(const fs::path& file) {
  std::ifstream in(file, std::ios::binary);
  const uint64_t file_size = fs::file_size(file);
  uint64_t length = 0;
  if (!in.read(reinterpret_cast<char*>(&length), sizeof(length)) ||
      length > std::min(file_size - sizeof(length), kLongestHeader)) {
    fail_damaged(file.string());
  }
  std::string header(length, '\0');
  if (!in.read(header.data(), static_cast<std::streamsize>(length))) fail_damaged(file.string());
  const uint64_t data = sizeof(length) + length;
  const json content = json::parse(header);
  for (const auto& [name, tensor] : content.items()) {
    if (name == "__metadata__") continue;
    const auto [begin, end] = tensor.at("data_offsets").get<std::array<uint64_t, 2>>();
    if (begin > end || end > file_size - data) fail_damaged(file.string());
    entries_.insert_or_assign(name, Entry{.file = file,
                                          .dtype = tensor.at("dtype"),
                                          .shape = tensor.at("shape"),
                                          .begin = data + begin,
                                          .size = end - begin});
  }
}

const Safetensors::Entry& Safetensors::find(const std::string& name) const {
  const auto found = entries_.find(name);
  if (found == entries_.end()) {
    fail(folder_.string(), " has no tensor ", name,
         ": its weights and config.json are of different models");
  }
  return found->second;
}

at::ScalarType Safetensors::dtype(const std::string& name) const {
  const Entry& entry = find(name);
  if (entry.dtype == "F32") return at::kFloat;
  if (entry.dtype == "F16") return at::kHalf;
  if (entry.dtype == "BF16") return at::kBFloat16;
  fail(entry.file.string(), ": weights must be F32, F16 or BF16, got ", name, " in ", entry.dtype);
}

at::Tensor Safetensors::read(const std::string& name, at::IntArrayRef shape) const {
  const Entry& entry = find(name);
  if (shape != entry.shape) {
    fail(entry.file.string(), ": tensor ", name, " must be ", shape, " by config.json, got ",
         at::IntArrayRef(entry.shape));
  }
  at::Tensor tensor = at::empty(shape, dtype(name));
  std::ifstream in(entry.file, std::ios::binary);
  in.seekg(static_cast<std::streamoff>(entry.begin));
  if (tensor.nbytes() != entry.size ||
      !in.read(static_cast<char*>(tensor.data_ptr()), static_cast<std::streamsize>(entry.size))) {
    fail_damaged(entry.file.string());
  }
  return tensor;
}

}  // namespace examples
