// Errors of the programs here: one line that says what to do.
#pragma once

#include <sstream>
#include <stdexcept>

namespace examples {

// Throws std::runtime_error of all parts as one text.
template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

}  // namespace examples
