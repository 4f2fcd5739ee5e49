// Command lines of programs: errors in one line, and for those that run a model two files and
// options.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <vector>

namespace examples {

struct Arguments {
  std::string model;  // a package, or a folder
  std::string ids;    // for read_token_ids() of token_ids.h
  bool dense = false;
  std::map<std::string, int64_t> numbers = {};  // options with a number, all at least 1
  std::map<std::string, std::string> texts = {};

  int64_t number(const std::string& option, int64_t otherwise) const;
  std::string text(const std::string& option, const std::string& otherwise) const;
};

// What a program takes beside --threads and --dense.
struct CommandLine {
  std::string usage;
  std::vector<std::string> numbers = {};  // options with a number
  std::vector<std::string> texts = {};    // options with a text
};

// What main() returns: the result of `body`, or 1 where it throws, which is printed in one line.
int report_errors(const std::function<int()>& body);

// What main() returns: reads the command line, runs `body` without gradients, and prints what it
// throws in one line.
int run_example(void (*body)(const Arguments& arguments), const CommandLine& line, int argc,
                char** argv);

}  // namespace examples
