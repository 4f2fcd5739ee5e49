// JSON files: one object each.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>

namespace examples {

// The object that a text holds. Throws std::runtime_error, which begins with `name`, if it is no
// JSON, or no object.
nlohmann::json parse_object(const std::string& text, const std::string& name);

// The same of a file.
nlohmann::json read_object(const std::filesystem::path& file);

}  // namespace examples
