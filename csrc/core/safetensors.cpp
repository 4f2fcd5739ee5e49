#include "core/safetensors.h"

#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <tuple>
#include <utility>

namespace h2o_prefill::safetensors {
namespace {

// In the order of files. Within one alignment the later ones come first.
constexpr std::array<std::pair<std::string_view, at::ScalarType>, 6> kCodes{{
    {"F16", at::kHalf},
    {"BF16", at::kBFloat16},
    {"I32", at::kInt},
    {"F32", at::kFloat},
    {"F64", at::kDouble},
    {"I64", at::kLong},
}};

constexpr size_t kAlignment = 8;

size_t bytes_of(at::ScalarType dtype, const std::vector<int64_t>& shape) {
  // Strides must fit too, also if a tensor has no elements.
  int64_t bytes = static_cast<int64_t>(c10::elementSize(dtype));
  bool empty = false;
  for (const int64_t size : shape) {
    TORCH_CHECK_VALUE(
        size >= 0 && !__builtin_mul_overflow(bytes, std::max<int64_t>(size, 1), &bytes),
        "a tensor is too large");
    empty = empty || size == 0;
  }
  return empty ? 0 : static_cast<size_t>(bytes);
}

size_t rank_of(at::ScalarType dtype) {
  return std::ranges::find(kCodes, dtype, [](const auto& code) { return code.second; }) -
         kCodes.begin();
}

at::ScalarType dtype_of(std::string_view code) {
  for (const auto& [name, dtype] : kCodes) {
    if (name == code) return dtype;
  }
  TORCH_CHECK_VALUE(false, "dtypes must be of a session, got ", code);
}

}  // namespace

std::string_view code_of(at::ScalarType dtype) {
  const size_t rank = rank_of(dtype);
  return rank < kCodes.size() ? kCodes[rank].first : "";
}

std::vector<Entry> layout(const std::map<std::string, at::Tensor>& tensors) {
  std::vector<Entry> entries;
  for (const auto& [name, tensor] : tensors) {
    entries.push_back({name, tensor.scalar_type(), tensor.sizes().vec(), 0, 0});
  }
  std::stable_sort(entries.begin(), entries.end(), [](const Entry& a, const Entry& b) {
    return rank_of(a.dtype) > rank_of(b.dtype);
  });
  size_t end = 0;
  for (Entry& entry : entries) {
    entry.begin = end;
    entry.end = end += bytes_of(entry.dtype, entry.shape);
  }
  return entries;
}

std::string to_text(const Header& header) {
  std::string text =
      c10::str(R"({"__metadata__":{)", to_json(header.key), ":", to_json(header.value), "}");
  for (const Entry& entry : header.entries) {
    text += c10::str(",", to_json(entry.name), R"(:{"dtype":")", code_of(entry.dtype),
                     R"(","shape":[)", c10::Join(",", entry.shape), R"(],"data_offsets":[)",
                     entry.begin, ",", entry.end, "]}");
  }
  text += "}";
  text.resize((text.size() + kAlignment - 1) / kAlignment * kAlignment, ' ');
  return text;
}

Header parse(std::string_view text, size_t bytes) {
  // The data lies in memory as it lies in the file.
  TORCH_CHECK_VALUE(text.size() % kAlignment == 0, "its header is damaged");
  // Blanks would be refused, and only the filling has any at the end.
  text = text.substr(0, text.find_last_not_of(' ') + 1);
  Reader reader(text);
  Header header;
  reader.expect(R"({"__metadata__":{)");
  header.key = reader.string();
  reader.expect(":");
  header.value = reader.string();
  reader.expect("}");
  size_t end = 0;
  while (reader.take(",")) {
    Entry entry;
    entry.name = reader.string();
    reader.expect(R"(:{"dtype":)");
    entry.dtype = dtype_of(reader.string());
    reader.expect(R"(,"shape":[)");
    while (!reader.take("]")) {
      if (!entry.shape.empty()) reader.expect(",");
      entry.shape.push_back(reader.integer());
    }
    reader.expect(R"(,"data_offsets":[)");
    entry.begin = reader.integer();
    reader.expect(",");
    entry.end = reader.integer();
    reader.expect("]}");
    TORCH_CHECK_VALUE(entry.begin == end && entry.end <= bytes &&
                          entry.begin % c10::elementSize(entry.dtype) == 0 &&
                          entry.end - entry.begin == bytes_of(entry.dtype, entry.shape),
                      entry.name, " must lie in the file, after the tensor before it");
    end = entry.end;
    header.entries.push_back(std::move(entry));
  }
  reader.expect("}");
  TORCH_CHECK_VALUE(reader.empty() && end == bytes, "the file must end with its last tensor");
  return header;
}

bool Reader::take(std::string_view text) {
  if (!rest_.starts_with(text)) return false;
  rest_.remove_prefix(text.size());
  return true;
}

void Reader::expect(std::string_view text) {
  TORCH_CHECK_VALUE(take(text), "its header is damaged");
}

std::string Reader::string() {
  expect("\"");
  std::string text;
  while (!take("\"")) {
    const bool escaped = take("\\");
    if (escaped && take("u00")) {
      const size_t digits = std::min<size_t>(rest_.size(), 2);
      unsigned char code = 0;
      const auto read = std::from_chars(rest_.data(), rest_.data() + digits, code, 16);
      TORCH_CHECK_VALUE(digits == 2 && read.ptr == rest_.data() + digits, "its header is damaged");
      text += static_cast<char>(code);
      rest_.remove_prefix(digits);
      continue;
    }
    const bool plain = !rest_.empty() && static_cast<unsigned char>(rest_[0]) >= ' ';
    TORCH_CHECK_VALUE(plain && (!escaped || rest_[0] == '"' || rest_[0] == '\\'),
                      "its header is damaged");
    text += rest_[0];
    rest_.remove_prefix(1);
  }
  return text;
}

int64_t Reader::integer() {
  constexpr size_t kMostDigits = 18;
  const size_t digits = std::min(rest_.find_first_not_of("0123456789"), rest_.size());
  TORCH_CHECK_VALUE(0 < digits && digits <= kMostDigits, "its header is damaged");
  int64_t value = 0;
  std::from_chars(rest_.data(), rest_.data() + digits, value);
  rest_.remove_prefix(digits);
  return value;
}

std::string to_json(std::string_view text) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  std::string out = "\"";
  for (const char c : text) {
    if (const auto code = static_cast<unsigned char>(c); code < ' ') {
      out += c10::str("\\u00", kDigits[code / 16], kDigits[code % 16]);
      continue;
    }
    if (c == '"' || c == '\\') out += '\\';
    out += c;
  }
  return out + "\"";
}

}  // namespace h2o_prefill::safetensors
