// The tokenizer in the folder H2O_TEST_TOKENIZER against Python's, whose results H2O_TEST_TEXTS
// has: texts with their token ids and the text that these decode to, and the ids of two chat
// messages. test_tokenizers.py writes both and runs these.
#include <gtest/gtest.h>
#include <h2o_prefill/tokenizer.h>
#include <torch/serialize.h>

#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <thread>

namespace h2o_prefill {
namespace {

const Tokenizer& tokenizer() {
  static const Tokenizer tokenizer(std::getenv("H2O_TEST_TOKENIZER"));
  return tokenizer;
}

c10::IValue expected(const char* name) {
  static const auto all = [] {
    std::ifstream file(std::getenv("H2O_TEST_TEXTS"), std::ios::binary);
    return torch::pickle_load({std::istreambuf_iterator<char>(file), {}}).toGenericDict();
  }();
  return all.at(name);
}

struct Example {
  std::string text, decoded;
  std::vector<int64_t> ids;
};

std::vector<int64_t> numbers(const at::Tensor& ids) {
  return {ids.const_data_ptr<int64_t>(), ids.const_data_ptr<int64_t>() + ids.numel()};
}

std::vector<Example> examples() {
  const auto bytes = [](const c10::IValue& value) {
    const at::Tensor tensor = value.toTensor();
    return std::string(static_cast<const char*>(tensor.const_data_ptr()), tensor.numel());
  };
  std::vector<Example> found;
  for (const c10::IValue& entry : expected("texts").toListRef()) {
    const auto& parts = entry.toTupleRef().elements();
    found.push_back({bytes(parts[0]), bytes(parts[2]), numbers(parts[1].toTensor())});
  }
  return found;
}

// Whether all characters of a text are whole.
bool is_utf8(const std::string& text) {
  for (size_t i = 0; i < text.size();) {
    const auto lead = static_cast<unsigned char>(text[i++]);
    const int more = lead < 0x80 ? 0 : lead >= 0xF0 ? 3 : lead >= 0xE0 ? 2 : lead >= 0xC0 ? 1 : 9;
    for (int k = 0; k < more; ++k) {
      if (i == text.size() || (text[i++] & 0xC0) != 0x80) return false;
    }
  }
  return true;
}

std::string streamed(TextStream& stream, const std::vector<int64_t>& ids) {
  std::string text;
  for (const int64_t id : ids) {
    const std::string piece = stream.put(id);
    EXPECT_TRUE(is_utf8(piece)) << piece;
    text += piece;
    if (stream.stopped()) return text;
  }
  return text + stream.end();
}

TEST(Tokenizer, GivesTheIdsAndTextsOfPythonOnThreads) {
  const auto all = examples();
  std::vector<std::thread> threads;
  for (int n = 0; n < 4; ++n) {
    threads.emplace_back([&] {
      for (const auto& [text, decoded, ids] : all) {
        ASSERT_EQ(numbers(tokenizer().encode(text)), ids) << text.substr(0, 200);
        ASSERT_EQ(tokenizer().decode(ids), decoded);
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

TEST(Tokenizer, ChatsByTheTemplate) {
  EXPECT_EQ(numbers(tokenizer().chat("Hello.")), numbers(expected("first").toTensor()));
  EXPECT_EQ(numbers(tokenizer().chat("Bye.", /*next=*/true)), numbers(expected("next").toTensor()));
}

TEST(TextStream, ShowsWholeCharacters) {
  for (const auto& [text, decoded, ids] : examples()) {
    TextStream stream(tokenizer());
    const size_t shown = std::min<size_t>(ids.size(), 500);
    const std::vector<int64_t> first(ids.begin(), ids.begin() + shown);
    ASSERT_EQ(streamed(stream, first), tokenizer().decode(first));
  }
}

TEST(TextStream, StopsAreNoPartOfTheText) {
  const std::string text = "One two, STO and STOP. Then more.";
  const auto ids = numbers(tokenizer().encode(text));
  TextStream stream(tokenizer(), {"none", "STOP"}), late(tokenizer(), {"more.."});
  EXPECT_EQ(streamed(stream, ids), "One two, STO and ");
  EXPECT_TRUE(stream.stopped());
  EXPECT_EQ(stream.end(), "");
  EXPECT_EQ(streamed(late, ids), text);
  EXPECT_EQ(late.end(), "");
  EXPECT_FALSE(late.stopped());
}

std::string message_of(const std::string& folder) {
  try {
    const Tokenizer other(folder);
  } catch (const c10::ValueError& error) {
    return error.what_without_backtrace();
  }
  return "nothing was thrown";
}

TEST(Tokenizer, OtherFoldersGetOneLine) {
  const std::string folder = testing::TempDir(), file = folder + "/openvino_tokenizer.xml";
  const std::string missing = message_of(folder);
  EXPECT_TRUE(missing.starts_with("there is no tokenizer for C++ in ")) << missing;
  std::ofstream(file) << "<?xml version=\"1.0\"?>\n<net";
  EXPECT_EQ(message_of(folder), missing);
  std::ofstream(file) << R"(<?xml version="1.0"?>
<net name="tokenizer" version="11"><layers/><edges/></net>
)";
  const std::string line = message_of(folder);
  EXPECT_NE(line.find("cannot run the tokenizer in "), std::string::npos) << line;
  EXPECT_EQ(line.find('\n'), std::string::npos);
  std::remove(file.c_str());
}

}  // namespace
}  // namespace h2o_prefill
