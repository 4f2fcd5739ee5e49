// Session files: a prompt with keys, values and states, which Python, C++ and packages continue.
//
// A session file is a safetensors file, so it holds no code. docs/cpp.md has its tensors and its
// metadata. Equal sessions are equal files.
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>

#include "h2o_prefill/config.h"
#include "h2o_prefill/export.h"

namespace h2o_prefill {

struct H2O_API SessionFile {
  // Tells models apart whose keys differ, by words "name=value" that blanks separate: config,
  // dtype and weights, and where there are some adapters and text of tokens.
  std::string model = {};
  std::string settings = {};  // as of PrefillConfig::to_fields()
  int64_t length = 0;         // tokens
  std::map<std::string, at::Tensor> tensors = {};

  // Throws c10::ValueError, which names the difference, unless it is of this model.
  void check_model(const std::string& wanted) const;

  // Throws c10::ValueError unless it has these settings; an open min_prefill fits any number.
  void check_settings(const PrefillConfig& wanted) const;

  // Throws c10::ValueError unless it is of this model and these settings, and fits.
  void check(const std::string& wanted_model, const PrefillConfig& wanted_settings, int64_t layers,
             int64_t max_tokens) const;
};

// "layers.7.", with which the names of a layer's tensors begin.
H2O_API std::string session_prefix(int64_t layer);

// Writes a session file whole or not at all; a file that is there keeps its permissions. Takes a
// copy of tensors that are not contiguous. Throws c10::ValueError if read_session_file() would
// refuse the file, std::runtime_error if it cannot be written: "[Errno 13] cannot write ...".
H2O_API void write_session_file(const std::string& path, const SessionFile& session);

// Reads a session file; its tensors are a private memory map of it. A file that is mapped may be
// replaced or removed, but not be changed in place. verify: whether the checksum is, which reads
// the whole file. All but the numbers in keys and values is checked in any case. Throws
// c10::ValueError, which names the path, if it is no session file, was cut or changed, or is of
// another version; std::runtime_error if it cannot be read: "[Errno 2] cannot read ...".
H2O_API SessionFile read_session_file(const std::string& path, bool verify = true);

}  // namespace h2o_prefill
