// A whole model that `h2o-prefill export` wrote: compiled code, and weights that are mapped.
//
//   const auto package = std::make_shared<const h2o_prefill::Package>("model");
//   h2o_prefill::PackageSession session(package);   // package_session.h
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>
#include <vector>

#include "h2o_prefill/config.h"
#include "h2o_prefill/export.h"

namespace h2o_prefill {

// The metadata of a package.
struct H2O_API PackageInfo {
  std::string model = {};       // name of the model's class
  std::string model_hash = {};  // of config and weights, which session files name
  PrefillConfig settings = {};
  at::ScalarType dtype = at::kFloat;  // of keys and values
  int64_t capacity = 0;               // tokens of prompt and answer together
  int64_t vocabulary = 0;
  int64_t layers = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  std::vector<int64_t> end_ids = {};  // token ids that end a text
  int64_t weights_bytes = 0;          // of the mapped weights, which processes share

  // Memory of a session for each of its tokens: token id, keys, values and scores.
  int64_t bytes_per_token() const;
};

// Weights and code, which any number of sessions share.
class H2O_API Package {
 public:
  // path: the folder of the package. Nothing is copied and nothing is written. concurrency: calls
  // that run at the same time; more wait for one to end. Throws c10::ValueError, in one line, if
  // there is no such package, it is damaged, or its code is for another PyTorch, another machine or
  // a CPU feature that is missing here; std::runtime_error if a file cannot be mapped.
  explicit Package(const std::string& path, int64_t concurrency = 1);
  ~Package();

  const PackageInfo& info() const;
  const std::unordered_map<std::string, std::string>& metadata() const;

  // Tensors of the state of a prompt without tokens, as the model takes them: token ids int64 [1,
  // capacity] and position int64 [2]; for each layer keys and values [1, Hkv, capacity, D], scores
  // float32 [1, Hkv, capacity], memory set int32 [1, Hkv, memory_size] and errors. They take memory
  // as they fill; std::runtime_error if there is none.
  std::vector<at::Tensor> new_state() const;

  // Number of tokens of a state. Throws c10::ValueError unless its tensors have the forms of
  // new_state() and its position is in them.
  int64_t length(const std::vector<at::Tensor>& state) const;

  // Throws c10::ValueError, in one line, unless token_ids are int64 [1, T] with T >= 1, in the
  // vocabulary, and there is room for them after `past` tokens.
  void check(const at::Tensor& token_ids, int64_t past) const;

  // Runs the model over token_ids, int64 [1, T] with T >= 1, after the tokens of a state, which it
  // changes. Returns the logits [R, vocabulary] of rows, int64 [R] in [0, T), R >= 1. Checks all of
  // them before it reads any: throws c10::ValueError, in one line.
  at::Tensor run(const at::Tensor& token_ids, const at::Tensor& rows,
                 const std::vector<at::Tensor>& state) const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace h2o_prefill
