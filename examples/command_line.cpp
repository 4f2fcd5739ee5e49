#include "command_line.h"

#include <ATen/Parallel.h>
#include <c10/core/InferenceMode.h>
#include <c10/util/Exception.h>
#include <h2o_prefill/library.h>

#include <algorithm>
#include <charconv>
#include <exception>
#include <iostream>

#include "fail.h"

namespace examples {
namespace {

constexpr int64_t kMostThreads = 4096;

// A number of at least 1.
int64_t read_number(const std::string& option, const std::string& text) {
  int64_t number = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  if (error != std::errc() || end != text.data() + text.size() || number < 1) {
    fail(option, " must be a number of at least 1, got ", text);
  }
  if (option == "--threads" && number > kMostThreads) {
    fail("--threads must be at most ", kMostThreads, ", got ", text);
  }
  return number;
}

Arguments read_arguments(const std::vector<std::string>& words, const CommandLine& line) {
  const auto is_among = [](const std::vector<std::string>& options, const std::string& word) {
    return std::find(options.begin(), options.end(), word) != options.end();
  };
  Arguments arguments;
  std::vector<std::string> files;
  for (size_t i = 0; i < words.size(); ++i) {
    const std::string& word = words[i];
    const bool has_value = i + 1 < words.size();
    if (word == "--dense") {
      arguments.dense = true;
    } else if (has_value && (word == "--threads" || is_among(line.numbers, word))) {
      arguments.numbers[word] = read_number(word, words[++i]);
    } else if (has_value && is_among(line.texts, word)) {
      arguments.texts[word] = words[++i];
    } else if (word.starts_with("--")) {
      fail("usage: ", line.usage);
    } else {
      files.push_back(word);
    }
  }
  if (files.size() != 2) fail("usage: ", line.usage);
  arguments.model = files[0];
  arguments.ids = files[1];
  return arguments;
}

}  // namespace

int64_t Arguments::number(const std::string& option, int64_t otherwise) const {
  const auto found = numbers.find(option);
  return found == numbers.end() ? otherwise : found->second;
}

std::string Arguments::text(const std::string& option, const std::string& otherwise) const {
  const auto found = texts.find(option);
  return found == texts.end() ? otherwise : found->second;
}

int report_errors(const std::function<int()>& body) {
  try {
    return body();
  } catch (const c10::Error& error) {
    std::cerr << "error: " << error.what_without_backtrace() << '\n';
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << '\n';
  }
  return 1;
}

int run_example(void (*body)(const Arguments& arguments), const CommandLine& line, int argc,
                char** argv) {
  return report_errors([&] {
    const Arguments arguments = read_arguments({argv + 1, argv + argc}, line);
    at::set_num_threads(static_cast<int>(arguments.number("--threads", at::get_num_threads())));
    h2o_prefill::cpu_isa();  // throws where H2O_PREFILL_ISA names none, before a model is read
    const c10::InferenceMode inference;
    body(arguments);
    return 0;
  });
}

}  // namespace examples
