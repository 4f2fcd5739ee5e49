// A whole model that `h2o-prefill export` wrote as an AOTInductor package, with the state of one
// text.
#pragma once

#include <ATen/core/Tensor.h>
#include <h2o_prefill/config.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace examples {

// The metadata of a package.
struct PackageInfo {
  std::string model;
  h2o_prefill::PrefillConfig settings;
  at::ScalarType dtype;  // of keys and values
  int64_t capacity;      // tokens of prompt and answer together
  int64_t vocabulary;
  int64_t layers;
  int64_t kv_heads;
  int64_t head_dim;
  std::vector<int64_t> end_ids;  // token ids that end a text
};

// Tokens of a call whose logits are wanted.
enum class Rows { kLast, kAll };

class Package {
 public:
  // Throws std::runtime_error, in one line, if there is no such file, it is no package of
  // h2o_prefill, or it was written for another PyTorch or another CPU.
  explicit Package(const std::string& path);

  const PackageInfo& info() const { return info_; }

  // Number of tokens of the text so far.
  int64_t length() const;

  // Begins another text.
  void reset();

  // Continues the text: token_ids int64 [1, T]. Returns logits [1 or T, vocabulary]. Throws
  // std::runtime_error if there are no tokens, some are out of the vocabulary, or there is no room
  // for them.
  at::Tensor forward(const at::Tensor& token_ids, Rows rows = Rows::kLast);

  // The same with dense attention, in calls that are too short to be sparse.
  at::Tensor forward_densely(const at::Tensor& token_ids, Rows rows = Rows::kLast);

 private:
  void check(const at::Tensor& token_ids) const;

  PackageInfo info_;
  std::unique_ptr<torch::inductor::AOTIModelPackageLoader> loader_;
  at::Tensor position_;
  std::vector<at::Tensor> state_;  // as PackageInfo.new_state() in package.py has it
};

}  // namespace examples
