// Files that are written whole or not at all.
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <string>

#include "common/rules.h"

namespace h2o_prefill {

// A scratch file in the folder of a target, which takes the target's place at the end.
//
// It has a name that nobody can guess, follows no link, and has the target's permissions before
// anything is in it. The scratch files of processes that died are removed by the next one for the
// same target: a living writer holds a lock on its own. Of a target that is a symbolic link, the
// file that it points to is replaced.
//
// Errors of the system are a std::runtime_error of one line, "[Errno 13] cannot write 'path':
// Permission denied". Throws c10::ValueError for a path that no file can have.
class AtomicFile {
 public:
  explicit AtomicFile(const std::string& path);
  ~AtomicFile() { discard(); }
  AtomicFile(const AtomicFile&) = delete;
  AtomicFile& operator=(const AtomicFile&) = delete;

  // Where the content goes that others write.
  std::string scratch() const { return scratch_.string(); }

  // Appends to the file.
  void write(const void* data, size_t bytes) const;
  // Replaces bytes that have been written.
  void overwrite(int64_t offset, const void* data, size_t bytes) const;

  // Replaces the target.
  void commit();
  // Removes the scratch file unless it has replaced the target.
  void discard();

 private:
  AtomicFile() = default;
  bool make_scratch();
  void remove_leftovers() const;
  [[noreturn]] void fail() const { throw_errno("write", path_); }

  std::string path_;
  std::filesystem::path target_;
  std::filesystem::path scratch_;
  int file_ = -1;
};

}  // namespace h2o_prefill
