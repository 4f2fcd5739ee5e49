#include "safetensors.h"

#include <ATen/ATen.h>
#include <c10/util/safe_numerics.h>

#include <algorithm>
#include <bit>
#include <fstream>
#include <limits>
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

std::optional<at::ScalarType> weight_dtype(const std::string& name) {
  if (name == "F32") return at::kFloat;
  if (name == "F16") return at::kHalf;
  if (name == "BF16") return at::kBFloat16;
  return std::nullopt;
}

// A list of numbers that are not negative.
std::vector<int64_t> read_numbers(const json& list) {
  std::vector<int64_t> numbers;
  for (const json& number : list.get_ref<const json::array_t&>()) {
    numbers.push_back(std::min<uint64_t>(number.get_ref<const json::number_unsigned_t&>(),
                                         std::numeric_limits<int64_t>::max()));
  }
  return numbers;
}

// Whether a tensor of this shape fills its part of the file.
bool has_size(const std::vector<int64_t>& shape, at::ScalarType dtype, uint64_t size) {
  uint64_t elements = 0, bytes = 0;
  return !c10::safe_multiplies_u64(shape, &elements) &&
         !c10::mul_overflows(elements, uint64_t{c10::elementSize(dtype)}, &bytes) && bytes == size;
}

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
    if (fs::path(file).filename() != file) fail(index.string(), " names a file elsewhere: ", file);
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
  const auto data = static_cast<int64_t>(sizeof(length) + length);
  const auto data_size = static_cast<int64_t>(file_size) - data;
  const json content = json::parse(header);
  if (!content.is_object()) fail_damaged(file.string());
  for (const auto& [name, tensor] : content.items()) {
    if (name == "__metadata__") continue;
    const auto range = read_numbers(tensor.at("data_offsets"));
    Entry entry{.file = file,
                .dtype_name = tensor.at("dtype").get<std::string>(),
                .dtype = weight_dtype(tensor.at("dtype").get<std::string>()),
                .shape = read_numbers(tensor.at("shape")),
                .begin = 0};
    if (range.size() != 2 || range[0] > range[1] || range[1] > data_size ||
        (entry.dtype && !has_size(entry.shape, *entry.dtype, range[1] - range[0]))) {
      fail_damaged(file.string());
    }
    entry.begin = data + range[0];
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
  if (!in) fail_damaged(entry.file.string());
  return tensor;
}

}  // namespace examples
