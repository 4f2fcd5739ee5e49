#include "runtime/package_files.h"

#include <caffe2/serialize/in_memory_adapter.h>
#include <caffe2/serialize/inline_container.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <torch/csrc/jit/serialization/unpickler.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <filesystem>
#include <memory>

#include "common/rules.h"
#include "core/session.h"

namespace h2o_prefill {
namespace {

namespace fs = std::filesystem;

constexpr const char* kPackageName = "h2o_prefill.package";
constexpr int64_t kPackageVersion = 1;

std::string weights_path(const std::string& folder) {
  TORCH_CHECK_VALUE(!fs::is_regular_file(folder), one_line(folder),
                    " is no folder that this version's `h2o-prefill export` wrote: export the "
                    "model again");
  const fs::path path = fs::path(folder) / "weights.pt";
  TORCH_CHECK_VALUE(fs::is_regular_file(path), "there is no package ", one_line(folder));
  return path;
}

// A tuple whose tensors are views of the mapping.
std::vector<c10::IValue> read_tuple(const Mapping& mapping) {
  caffe2::serialize::PyTorchStreamReader reader(
      std::make_shared<caffe2::serialize::MemoryReadAdapter>(mapping.data(), mapping.size()));
  const auto place = [&](const std::string& record) {
    return mapping.data() + reader.getRecordOffset(record);
  };
  const char* next = place("data.pkl");
  const size_t size = reader.getRecordSize("data.pkl");
  const char* const end = next + size;
  std::array<uint32_t, 2> descriptor{};  // a signature, and the CRC
  std::memcpy(descriptor.data(), end, sizeof descriptor);
  TORCH_CHECK(descriptor[1] == checksum(next, size));
  torch::jit::Unpickler unpickler(
      [&](char* to, size_t most) {
        const size_t count = std::min(most, static_cast<size_t>(end - next));
        std::memcpy(to, next, count);
        next += count;
        return count;
      },
      /*type_resolver=*/nullptr, /*obj_loader=*/nullptr,
      [&](const std::string& key) { return at::DataPtr(place("data/" + key), at::kCPU); },
      /*device=*/std::nullopt);
  return std::move(*unpickler.parse_ivalue().toTuple()).elements();
}

}  // namespace

Mapping::Mapping(const std::string& path) {
  const int file = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (file < 0) throw_errno("read", path);
  struct stat status{};
  fstat(file, &status);
  size_ = static_cast<size_t>(status.st_size);
  data_ = mmap(nullptr, size_, PROT_READ, MAP_SHARED, file, 0);
  const int error = errno;
  close(file);
  errno = error;
  if (data_ == MAP_FAILED) throw_errno("map", path);
}

Mapping::Mapping(size_t size)
    : data_(mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)),
      size_(size) {
  if (data_ == MAP_FAILED) throw_errno("allocate", std::to_string(size) + " bytes");
}

Mapping::~Mapping() { munmap(data_, size_); }

PackageFiles::PackageFiles(const std::string& folder) : mapping(weights_path(folder)) {
  int64_t version = 0;
  try {
    const auto values = read_tuple(mapping);
    TORCH_CHECK(values.at(0).toStringRef() == kPackageName);
    version = values.at(1).toInt();
    for (const auto& item : values.at(2).toGenericDict()) {
      metadata.emplace(item.key().toStringRef(), item.value().toStringRef());
    }
    for (const auto& item : values.at(3).toGenericDict()) {
      weights.emplace(item.key().toStringRef(), item.value().toTensor());
    }
    code = folder + "/code-" + metadata.at("code");
  } catch (const std::exception&) {
    TORCH_CHECK_VALUE(false, one_line(folder),
                      " is no package that `h2o-prefill export` wrote, or is damaged");
  }
  TORCH_CHECK_VALUE(version == kPackageVersion, "version of the package must be ", kPackageVersion,
                    ", got ", version, ": export the model again");
}

void PackageFiles::check_code() const {
  uint32_t sum = 0;
  for (const char* suffix : {".so", ".json"}) {
    const Mapping file(code + suffix);
    sum = checksum(file.data(), file.size(), sum);
  }
  TORCH_CHECK_VALUE(std::to_string(sum) == metadata.at("code"), one_line(code),
                    ".so is damaged: export the model again");
}

}  // namespace h2o_prefill
