// Text in, text out, without Python: answers questions about a long text.
//
//   generate PACKAGE TEXT.txt [--dense] < questions.txt
//
// PACKAGE is the folder that `h2o-prefill export` wrote. Questions are lines of standard input;
// each goes on from the answers before. --dense prefills the text densely. Standard error has the
// seconds to the first token, the rate of the tokens after it, and the most memory of the process.
#include <h2o_prefill/package_session.h>
#include <h2o_prefill/tokenizer.h>
#include <sys/resource.h>

#include <chrono>
#include <fstream>
#include <iostream>
#include <sstream>

namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

// Of this process, with the pages of the package that it has read.
int64_t peak_megabytes() {
  rusage usage{};
  getrusage(RUSAGE_SELF, &usage);
  return usage.ru_maxrss * 1024 / 1'000'000;  // Linux counts in KiB.
}

void run(const std::string& package, const std::string& text_file, bool dense) {
  h2o_prefill::PackageSession session(std::make_shared<const h2o_prefill::Package>(package));
  const h2o_prefill::Tokenizer tokenizer(package + "/tokenizer");
  h2o_prefill::Sampler greedy;
  std::ostringstream text;
  if (!(text << std::ifstream(text_file).rdbuf())) {
    throw std::runtime_error("cannot read " + text_file);
  }
  for (std::string question; std::getline(std::cin, question);) {
    const auto begin = Clock::now();
    const bool first = session.length() == 0;
    auto ids = first ? tokenizer.chat(text.str() + "\n\n" + question)
                     : tokenizer.chat(question, /*next=*/true);
    if (first && dense) {  // all but the last token, which generate() begins with
      const int64_t last = ids.size(1) - 1;
      session.forward_densely(ids.narrow(1, 0, last));
      ids = ids.narrow(1, last, 1);
    }
    h2o_prefill::TextStream answer(tokenizer);
    Clock::time_point first_token;
    int64_t tokens = 0;
    session.generate(ids, {.max_new_tokens = 48}, greedy, [&](int64_t token) {
      if (++tokens == 1) {
        first_token = Clock::now();
        std::cerr << "first token after " << seconds_since(begin) << " s\n";
      }
      std::cout << answer.put(token) << std::flush;
      return true;
    });
    std::cout << answer.end() << std::endl;
    if (tokens < 2) continue;
    const double rate = (tokens - 1) / seconds_since(first_token);
    std::cerr << rate << " tokens/s after it, peak memory " << peak_megabytes() << " MB\n";
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  const bool dense = arguments.size() == 3 && arguments[2] == "--dense";
  if (arguments.size() != (dense ? 3 : 2)) {
    std::cerr << "usage: generate PACKAGE TEXT.txt [--dense] < questions.txt\n";
    return 1;
  }
  try {
    run(arguments[0], arguments[1], dense);
    return 0;
  } catch (const c10::Error& error) {
    std::cerr << "error: " << error.what_without_backtrace() << '\n';
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << '\n';
  }
  return 1;
}
