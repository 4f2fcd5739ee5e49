// Command lines of the programs that run a model: two files and options.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace examples {

struct Arguments {
  std::string model;  // a package, or a folder
  std::string ids;    // for read_token_ids() of text_tasks.h
  bool dense = false;
  std::map<std::string, std::string> options = {};  // those that have a value

  std::string text(const std::string& option, const std::string& otherwise) const;
  // At least 1: throws std::runtime_error if it is something else.
  int64_t number(const std::string& option, int64_t otherwise) const;
};

// Reads the command line, runs `body` without gradients, prints an exception in one line, and
// returns the exit code. `options` have a value; all programs also take --threads and --dense.
int run_example(void (*body)(const Arguments& arguments), const std::string& usage,
                std::vector<std::string> options, int argc, char** argv);

}  // namespace examples
