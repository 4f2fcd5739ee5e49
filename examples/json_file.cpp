#include "json_file.h"

#include <fstream>
#include <iterator>

#include "fail.h"

namespace examples {

nlohmann::json parse_object(const std::string& text, const std::string& name) {
  nlohmann::json value;
  try {
    value = nlohmann::json::parse(text);
  } catch (const nlohmann::json::parse_error& error) {
    fail(name, " is damaged: no JSON at byte ", error.byte, ": download or save it again");
  } catch (const nlohmann::json::exception&) {
    fail(name, " holds a number that is too large: download or save it again");
  }
  if (!value.is_object()) fail(name, " must hold a JSON object, got ", value.type_name());
  return value;
}

nlohmann::json read_object(const std::filesystem::path& file) {
  std::ifstream in(file, std::ios::binary);
  if (!in) fail("cannot read ", file.string());
  return parse_object({std::istreambuf_iterator<char>(in), {}}, file.string());
}

}  // namespace examples
