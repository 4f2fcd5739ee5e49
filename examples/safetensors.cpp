#include "safetensors.h"

#include <ATen/ATen.h>

#include <algorithm>
#include <bit>
#include <fstream>
#include <limits>
#include <set>

#include "fail.h"
#include "json_file.h"

namespace examples {
namespace {

namespace fs = std::filesystem;
using nlohmann::json;

static_assert(std::endian::native == std::endian::little,
              "the data of safetensors is little-endian");

// Longer headers are refused by the format's own reader too.
constexpr int64_t kLongestHeader = 100'000'000;

[[noreturn]] void fail_damaged(const fs::path& file, const std::string& what) {
  fail(file.string(), " is truncated or damaged: ", what, ": download or save it again");
}

std::optional<at::ScalarType> weight_dtype(const std::string& name) {
  if (name == "F32") return at::kFloat;
  if (name == "F16") return at::kHalf;
  if (name == "BF16") return at::kBFloat16;
  return std::nullopt;
}

// A list of numbers that are not negative; none if it is something else.
std::optional<std::vector<int64_t>> read_numbers(const json& entry, const char* key) {
  const auto found = entry.find(key);
  if (found == entry.end() || !found->is_array()) return std::nullopt;
  std::vector<int64_t> numbers;
  for (const json& number : *found) {
    if (!number.is_number_unsigned()) return std::nullopt;
    const auto value = number.get<uint64_t>();
    if (value > uint64_t{std::numeric_limits<int64_t>::max()}) return std::nullopt;
    numbers.push_back(static_cast<int64_t>(value));
  }
  return numbers;
}

// Bytes of a tensor; -1 if they are more than an int64_t can say.
int64_t size_in_bytes(at::ScalarType dtype, const std::vector<int64_t>& shape) {
  int64_t bytes = static_cast<int64_t>(c10::elementSize(dtype));
  for (const int64_t extent : shape) {
    if (__builtin_mul_overflow(bytes, extent, &bytes)) return -1;
  }
  return bytes;
}

}  // namespace

Safetensors::Safetensors(const fs::path& folder) : folder_(folder) {
  const fs::path index = folder / "model.safetensors.index.json";
  if (!fs::exists(index)) {
    read_header(folder / "model.safetensors");
    return;
  }
  const json content = read_object(index);
  const auto map = content.find("weight_map");
  if (map == content.end() || !map->is_object()) fail_damaged(index, "it has no weight_map");
  std::set<std::string> files;
  for (const json& file : *map) {
    if (!file.is_string()) fail_damaged(index, "the names of its files are no texts");
    files.insert(file.get<std::string>());
  }
  for (const std::string& file : files) {
    if (fs::path(file).filename() != file) fail(index.string(), " names a file elsewhere: ", file);
    read_header(folder / file);
  }
}

// The length of the header in 8 bytes, the header, JSON, and the data, to which its offsets refer.
void Safetensors::read_header(const fs::path& file) {
  if (!fs::is_regular_file(file)) fail("there is no ", file.string());
  std::ifstream in(file, std::ios::binary);
  const auto file_size = static_cast<int64_t>(fs::file_size(file));
  uint64_t length = 0;
  if (!in.read(reinterpret_cast<char*>(&length), sizeof(length))) {
    fail_damaged(file, "it has no header");
  }
  const int64_t left = file_size - static_cast<int64_t>(sizeof(length));
  if (length > static_cast<uint64_t>(std::min(left, kLongestHeader))) {
    fail_damaged(file, "it is too short for its header");
  }
  std::string header(length, '\0');
  if (!in.read(header.data(), static_cast<std::streamsize>(length))) {
    fail_damaged(file, "its header cannot be read");
  }
  const int64_t data_size = left - static_cast<int64_t>(length);
  const json content = parse_object(header, file.string());
  for (const auto& [name, tensor] : content.items()) {
    if (name == "__metadata__") continue;
    const auto shape = read_numbers(tensor, "shape");
    const auto range = read_numbers(tensor, "data_offsets");
    const auto dtype = tensor.find("dtype");
    if (!shape || !range || range->size() != 2 || dtype == tensor.end() || !dtype->is_string()) {
      fail_damaged(file, "tensor " + name + " is not described as safetensors are");
    }
    const int64_t begin = range->front(), end = range->back();
    if (begin > end || end > data_size) {
      fail_damaged(file, "it is too short for tensor " + name);
    }
    Entry entry{.file = file,
                .dtype_name = dtype->get<std::string>(),
                .dtype = weight_dtype(dtype->get<std::string>()),
                .shape = *shape,
                .begin = file_size - data_size + begin};
    if (entry.dtype && size_in_bytes(*entry.dtype, *shape) != end - begin) {
      fail_damaged(file, "tensor " + name + " has another size than its shape");
    }
    entries_.insert_or_assign(name, std::move(entry));
  }
}

const Safetensors::Entry& Safetensors::find(const std::string& name) const {
  const auto found = entries_.find(name);
  if (found == entries_.end()) {
    fail(folder_.string(), " has no tensor ", name,
         ": its weights and config.json are of different models");
  }
  const Entry& entry = found->second;
  if (!entry.dtype) {
    fail(entry.file.string(), ": weights must be F32, F16 or BF16, got ", name, " in ",
         entry.dtype_name);
  }
  return entry;
}

at::ScalarType Safetensors::dtype(const std::string& name) const { return *find(name).dtype; }

at::Tensor Safetensors::read(const std::string& name, at::IntArrayRef shape) const {
  const Entry& entry = find(name);
  if (shape != entry.shape) {
    fail(entry.file.string(), ": tensor ", name, " must be ", shape, " by config.json, got ",
         at::IntArrayRef(entry.shape));
  }
  at::Tensor tensor = at::empty(shape, *entry.dtype);
  std::ifstream in(entry.file, std::ios::binary);
  in.seekg(entry.begin);
  in.read(static_cast<char*>(tensor.data_ptr()), static_cast<std::streamsize>(tensor.nbytes()));
  if (!in) fail_damaged(entry.file, "tensor " + name + " cannot be read");
  return tensor;
}

}  // namespace examples
