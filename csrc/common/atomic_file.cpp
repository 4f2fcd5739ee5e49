#include "common/atomic_file.h"

#include <c10/core/GeneratorImpl.h>
#include <c10/util/Exception.h>
#include <c10/util/StringUtil.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <system_error>

#include "common/rules.h"

namespace h2o_prefill {
namespace {

namespace fs = std::filesystem;

constexpr size_t kRandomDigits = 16;
constexpr size_t kLongestStem = 200;  // of a name's 255 bytes

// ".name.0123456789abcdef.part.json": the suffix stays last, by which writers choose a format.
std::string prefix_of(const fs::path& target) {
  return "." + target.stem().string().substr(0, kLongestStem) + ".";
}
std::string suffix_of(const fs::path& target) { return ".part" + target.extension().string(); }

// The file that a chain of symbolic links ends at, whether it exists or not.
fs::path end_of_links(fs::path path) {
  constexpr int kMostLinks = 40;
  std::error_code error;
  for (int i = 0; i < kMostLinks && fs::is_symlink(fs::symlink_status(path, error)); ++i) {
    path = path.parent_path() / fs::read_symlink(path, error);
  }
  return path;
}

bool is_scratch(const std::string& name, const std::string& prefix, const std::string& suffix) {
  return name.size() == prefix.size() + kRandomDigits + suffix.size() && name.starts_with(prefix) &&
         name.ends_with(suffix) &&
         name.find_first_not_of("0123456789abcdef", prefix.size()) == name.size() - suffix.size();
}

}  // namespace

// The destructor runs after the delegated constructor, also if this one throws.
AtomicFile::AtomicFile(const std::string& path) : AtomicFile() {
  path_ = path;
  TORCH_CHECK_VALUE(path.find('\0') == std::string::npos, "a path must have no null byte");
  std::error_code error;
  target_ = end_of_links(fs::absolute(path));
  TORCH_CHECK_VALUE(!fs::is_directory(target_, error), "'", one_line(path), "' is a folder");
  TORCH_CHECK_VALUE(!fs::exists(target_, error) || fs::is_regular_file(target_, error), "'",
                    one_line(path), "' must be a regular file");
  remove_leftovers();
  while (!make_scratch()) discard();
}

void AtomicFile::discard() {
  if (file_ < 0) return;
  if (!scratch_.empty()) unlink(scratch_.c_str());
  close(file_);
  file_ = -1;
}

// Returns false if another process took the file for a leftover before it was locked.
bool AtomicFile::make_scratch() {
  const std::string digits = hexadecimal(c10::detail::getNonDeterministicRandom());
  scratch_ = target_.parent_path() / (prefix_of(target_) + digits + suffix_of(target_));
  struct stat replaced{};
  const bool replaces = stat(target_.c_str(), &replaced) == 0;
  const mode_t mode = replaces ? 0600 : 0666;
  file_ = open(scratch_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, mode);
  if (file_ < 0) fail();
  // File systems without locks keep their leftovers.
  if (flock(file_, LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) return false;
  struct stat made{};
  if (fstat(file_, &made) != 0) fail();
  if (made.st_nlink == 0) return false;
  if (replaces && fchmod(file_, replaced.st_mode & 07777) != 0) fail();
  return true;
}

void AtomicFile::remove_leftovers() const {
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(target_.parent_path(), error)) {
    if (!is_scratch(entry.path().filename().string(), prefix_of(target_), suffix_of(target_))) {
      continue;
    }
    const int left = open(entry.path().c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC);
    if (left < 0) continue;
    if (flock(left, LOCK_EX | LOCK_NB) == 0) unlink(entry.path().c_str());
    close(left);
  }
}

void AtomicFile::write(const void* data, size_t bytes) const {
  const char* from = static_cast<const char*>(data);
  while (bytes > 0) {
    const ssize_t written = ::write(file_, from, bytes);
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) fail();
    from += written;
    bytes -= static_cast<size_t>(written);
  }
}

void AtomicFile::overwrite(int64_t offset, const void* data, size_t bytes) const {
  if (pwrite(file_, data, bytes, offset) != static_cast<ssize_t>(bytes)) fail();
}

void AtomicFile::commit() {
  // Others may have written it by its name, as a new file.
  const int written = open(scratch_.c_str(), O_RDONLY | O_NOFOLLOW | O_CLOEXEC);
  if (written < 0) fail();
  const bool synced = fsync(written) == 0;
  close(written);
  if (!synced || std::rename(scratch_.c_str(), target_.c_str()) != 0) fail();
  scratch_.clear();
}

}  // namespace h2o_prefill
