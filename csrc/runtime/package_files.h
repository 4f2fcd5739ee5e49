// The files of a package, a folder that `h2o-prefill export` wrote.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <unordered_map>

namespace h2o_prefill {

// Memory that the system fills as it is read or written.
class Mapping {
 public:
  // A file, read-only: processes share its pages.
  explicit Mapping(const std::string& path);
  // Zeros.
  explicit Mapping(size_t size);
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping();

  char* data() const { return static_cast<char*>(data_); }
  size_t size() const { return size_; }

 private:
  void* data_ = nullptr;
  size_t size_ = 0;
};

// weights.pt, PyTorch's container of a tuple: what it is, its version, metadata, weights by name.
struct PackageFiles {
  // Throws c10::ValueError, in one line, if there is no such package, or its files are incomplete.
  // Weights are not compared with their checksums, which would read all of them.
  explicit PackageFiles(const std::string& folder);

  // Throws c10::ValueError if the code is not the one that the metadata name.
  void check_code() const;

  Mapping mapping;
  std::unordered_map<std::string, std::string> metadata;
  std::unordered_map<std::string, at::Tensor> weights;  // views of the mapping
  std::string code;                                     // path without suffix
};

}  // namespace h2o_prefill
