// Errors of the programs here: one line that says what to do.
#pragma once

#include <c10/util/Exception.h>

#include <exception>
#include <functional>
#include <iostream>
#include <sstream>
#include <stdexcept>
#include <string>

namespace examples {

// Throws std::runtime_error of all parts as one text.
template <typename... Parts>
[[noreturn]] void fail(const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  throw std::runtime_error(text.str());
}

// The error for a model file whose content cannot be used.
[[noreturn]] inline void fail_damaged(const std::string& file) {
  fail(file, " is truncated or damaged: download or save it again");
}

// Returns the exit code of main(): that of `body`, or 1 if it throws, with the error in one line.
inline int report_errors(const std::function<int()>& body) {
  try {
    return body();
  } catch (const c10::Error& error) {
    std::cerr << "error: " << error.what_without_backtrace() << '\n';
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << '\n';
  }
  return 1;
}

}  // namespace examples
