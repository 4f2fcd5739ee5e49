#include "command_line.h"

#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>
#include <h2o_prefill/library.h>

#include <algorithm>
#include <charconv>

#include "errors.h"

namespace examples {
namespace {

constexpr int64_t kMostThreads = 4096;

Arguments read_arguments(const std::vector<std::string>& words, const std::string& usage,
                         const std::vector<std::string>& options) {
  Arguments arguments;
  std::vector<std::string> files;
  for (size_t i = 0; i < words.size(); ++i) {
    const std::string& word = words[i];
    if (word == "--dense") {
      arguments.dense = true;
    } else if (!word.starts_with("--")) {
      files.push_back(word);
    } else if (i + 1 < words.size() &&
               std::find(options.begin(), options.end(), word) != options.end()) {
      arguments.options[word] = words[++i];
    } else {
      fail("usage: ", usage);
    }
  }
  if (files.size() != 2) fail("usage: ", usage);
  arguments.model = files[0];
  arguments.ids = files[1];
  return arguments;
}

}  // namespace

std::string Arguments::text(const std::string& option, const std::string& otherwise) const {
  const auto found = options.find(option);
  return found == options.end() ? otherwise : found->second;
}

int64_t Arguments::number(const std::string& option, int64_t otherwise) const {
  const std::string value = text(option, std::to_string(otherwise));
  const char* end = value.data() + value.size();
  int64_t number = 0;
  const auto [read, error] = std::from_chars(value.data(), end, number);
  if (error != std::errc() || read != end || (number < 1 && options.contains(option))) {
    fail(option, " must be a number of at least 1, got ", value);
  }
  return number;
}

int run_example(void (*body)(const Arguments& arguments), const std::string& usage,
                std::vector<std::string> options, int argc, char** argv) {
  return report_errors([&] {
    options.push_back("--threads");
    const Arguments arguments = read_arguments({argv + 1, argv + argc}, usage, options);
    const int64_t threads = arguments.number("--threads", at::get_num_threads());
    if (threads > kMostThreads) fail("--threads must be at most ", kMostThreads);
    at::set_num_threads(static_cast<int>(threads));
    h2o_prefill::cpu_isa();  // throws where H2O_PREFILL_ISA names none, before a model is read
    const c10::InferenceMode inference;
    body(arguments);
    return 0;
  });
}

}  // namespace examples
