// A session: a prompt with keys, values and states, in PyTorch's own container. The file is one
// tuple of str, int and Tensor, which torch.load(weights_only=True) reads as well:
// ("h2o_prefill.session", version, settings, fingerprint, token ids [B, length] or empty, tensors
// of each layer int64 [layers], then these tensors, as LayerState::tensors() returns them).
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <string>

#include "core/state_header.h"
#include "h2o_prefill/config.h"

namespace h2o_prefill {

// CRC-32 of some bytes; `before` is the CRC of the bytes before them.
uint32_t checksum(const char* data, size_t size, uint32_t before = 0);

struct Session {
  std::string settings = {};     // as of PrefillConfig::to_fields()
  std::string fingerprint = {};  // of the model
  at::Tensor token_ids = {};     // undefined: not known
  LayerStates layers = {};       // of one length

  int64_t length() const { return layers[0]->length(); }

  // Writes a file whole or not at all. Throws std::runtime_error if it cannot be written.
  void write(const std::string& path) const;

  // Reads a file. Throws c10::ValueError, which names the path, if it is no session or is damaged,
  // or if it is of another model or other settings (an open min_prefill fits any number), of other
  // layers or more tokens.
  static Session read(const std::string& path, const std::string& fingerprint,
                      const PrefillConfig& settings, int64_t layers, int64_t max_tokens);
};

}  // namespace h2o_prefill
