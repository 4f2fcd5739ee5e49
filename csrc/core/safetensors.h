// The header of a safetensors file as its library writes it: JSON without blanks, tensors in the
// order of their bytes. https://github.com/huggingface/safetensors#format
#pragma once

#include <ATen/core/Tensor.h>

#include <cstdint>
#include <map>
#include <string>
#include <string_view>
#include <vector>

namespace h2o_prefill::safetensors {

// A tensor of a file.
struct Entry {
  std::string name;
  at::ScalarType dtype;
  std::vector<int64_t> shape;
  size_t begin;  // of its bytes, after the header
  size_t end;
};

struct Header {
  std::string key;  // of the one entry of metadata
  std::string value;
  std::vector<Entry> entries;
};

// "F32", as files name it; empty for a dtype that none of ours has.
std::string_view code_of(at::ScalarType dtype);

// Entries of tensors, in the order of falling alignment, then of their names.
std::vector<Entry> layout(const std::map<std::string, at::Tensor>& tensors);

// The text of a header, which blanks fill up to a multiple of eight bytes.
std::string to_text(const Header& header);

// Reads what to_text() returned and checks that tensors follow each other up to `bytes`, the size
// of the rest of the file. Throws c10::ValueError for anything else.
Header parse(std::string_view text, size_t bytes);

// Reads one JSON text without blanks.
class Reader {
 public:
  explicit Reader(std::string_view text) : rest_(text) {}

  // Whether the text goes on with this, which is taken.
  bool take(std::string_view text);
  // Takes a text that must come next.
  void expect(std::string_view text);
  // A string without escapes other than of quotes, backslashes and, by \u00XX, control characters.
  std::string string();
  // A number of at most 18 digits.
  int64_t integer();
  bool empty() const { return rest_.empty(); }

 private:
  std::string_view rest_;
};

// A string as JSON. Under the name `quoted`, std::quoted would be called for a std::string.
std::string to_json(std::string_view text);

}  // namespace h2o_prefill::safetensors
