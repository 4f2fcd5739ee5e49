#pragma once

#include <cstring>

namespace cuda_emulation {

// Where in a kernel a call stands.
struct Site {
  const char* file;
  int line;

  // As a default argument: the place of the call.
  static constexpr Site here(const char* file = __builtin_FILE(), int line = __builtin_LINE()) {
    return {file, line};
  }

  bool operator==(const Site& other) const {
    return line == other.line && (file == other.file || std::strcmp(file, other.file) == 0);
  }
};

}  // namespace cuda_emulation
