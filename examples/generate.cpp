// Text in, text out, without Python: answers questions about a long text.
//
//   generate PACKAGE TEXT.txt [--dense] < questions.txt
//
// PACKAGE is the folder that `h2o-prefill export` wrote. Questions are lines of standard input;
// each goes on from the answers before. --dense prefills the text densely.
#include <h2o_prefill/package_session.h>
#include <h2o_prefill/tokenizer.h>

#include <chrono>
#include <fstream>
#include <iostream>
#include <sstream>

namespace {

void run(const std::string& package, const std::string& text_file, bool dense) {
  h2o_prefill::PackageSession session(std::make_shared<const h2o_prefill::Package>(package));
  const h2o_prefill::Tokenizer tokenizer(package + "/tokenizer");
  h2o_prefill::Sampler greedy;
  std::ostringstream text;
  if (!(text << std::ifstream(text_file).rdbuf())) {
    throw std::runtime_error("cannot read " + text_file);
  }
  for (std::string question; std::getline(std::cin, question);) {
    const auto begin = std::chrono::steady_clock::now();
    const bool first = session.length() == 0;
    auto ids = first ? tokenizer.chat(text.str() + "\n\n" + question)
                     : tokenizer.chat(question, /*next=*/true);
    if (first && dense) {  // all but the last token, which generate() begins with
      const int64_t last = ids.size(1) - 1;
      session.forward_densely(ids.narrow(1, 0, last));
      ids = ids.narrow(1, last, 1);
    }
    h2o_prefill::TextStream answer(tokenizer);
    bool told = false;
    session.generate(ids, {.max_new_tokens = 48}, greedy, [&](int64_t token) {
      const std::chrono::duration<double> passed = std::chrono::steady_clock::now() - begin;
      if (!told) std::cerr << "first token after " << passed.count() << " s\n";
      told = true;
      std::cout << answer.put(token) << std::flush;
      return true;
    });
    std::cout << answer.end() << std::endl;
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
