// Reads the weights of a Hugging Face folder. The format:
// https://github.com/huggingface/safetensors
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

namespace examples {

class Safetensors {
 public:
  // Reads the headers of model.safetensors, or of the files that model.safetensors.index.json names
  // (shards). Throws std::runtime_error that names the file if one is missing, truncated or
  // damaged.
  explicit Safetensors(const std::filesystem::path& folder);

  // Dtype of a tensor. Throws std::runtime_error as read() does.
  at::ScalarType dtype(const std::string& name) const;

  // Reads a tensor on the CPU. Throws std::runtime_error if there is none of this name, it has
  // another shape, or its dtype is none of float32, float16 and bfloat16.
  at::Tensor read(const std::string& name, at::IntArrayRef shape) const;

 private:
  struct Entry {
    std::filesystem::path file;
    std::string dtype;  // as the format names it
    std::vector<int64_t> shape;
    uint64_t begin, size;  // of the data in the file, in bytes
  };

  void read_header(const std::filesystem::path& file);
  const Entry& find(const std::string& name) const;

  std::filesystem::path folder_;
  std::map<std::string, Entry> entries_;
};

}  // namespace examples
