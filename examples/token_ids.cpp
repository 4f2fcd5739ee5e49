#include "token_ids.h"

#include <ATen/ATen.h>

#include <cstring>
#include <fstream>
#include <iostream>
#include <iterator>
#include <sstream>
#include <vector>

#include "fail.h"

namespace examples {

at::Tensor read_token_ids(const std::string& path) {
  std::vector<int64_t> ids;
  const bool binary = path.ends_with(".bin");
  std::ifstream file;
  if (path != "-") {
    file.open(path, std::ios::binary);
    file.peek();  // a folder opens, but cannot be read
    if (!file.good() && !file.eof()) fail("cannot read ", path);
  }
  std::istream& in = path == "-" ? std::cin : file;
  const std::string bytes{std::istreambuf_iterator<char>(in), {}};
  if (binary) {
    if (bytes.size() % sizeof(int64_t) != 0) fail(path, " must hold int64 token ids");
    ids.resize(bytes.size() / sizeof(int64_t));
    std::memcpy(ids.data(), bytes.data(), bytes.size());
  } else {
    std::istringstream words(bytes);
    for (int64_t id = 0; words >> id;) ids.push_back(id);
    if (!words.eof()) fail(path, " must hold token ids with white space between, or end in .bin");
  }
  if (ids.empty()) fail("the prompt is empty: ", path, " holds no token ids");
  return at::tensor(ids, at::kLong).unsqueeze(0);
}

void check_token_ids(const at::Tensor& token_ids, int64_t vocabulary) {
  if (token_ids.size(1) == 0) fail("the prompt is empty");
  const int64_t lowest = token_ids.min().item<int64_t>();
  const int64_t highest = token_ids.max().item<int64_t>();
  if (lowest < 0 || highest >= vocabulary) {
    fail("token ids must be in [0, ", vocabulary, "), got ", lowest < 0 ? lowest : highest,
         ": were they made by another tokenizer?");
  }
}

}  // namespace examples
