#include "evenkeel/trainer/data/file_list.h"

#include <glob.h>

#include <algorithm>
#include <filesystem>
#include <system_error>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/files/file_io.h"

namespace evenkeel {
namespace {

bool IsRegular(const std::string& path) {
  std::error_code error;
  return std::filesystem::is_regular_file(path, error);
}

absl::StatusOr<std::vector<std::string>> FilesIn(const std::string& folder) {
  EK_ASSIGN_OR_RETURN(const std::vector<std::string> names, NamesIn(folder));
  std::vector<std::string> files;
  for (const std::string& name : names) {
    const std::string path = std::filesystem::path(folder) / name;
    if (!name.starts_with(".") && IsRegular(path)) files.push_back(path);
  }
  if (files.empty()) return absl::NotFoundError(absl::StrCat("no file in the folder ", folder));
  return files;
}

absl::StatusOr<std::vector<std::string>> Matches(const std::string& pattern) {
  struct Found : glob_t {
    Found() : glob_t{} {}
    ~Found() { globfree(this); }
  } found;
  if (const int code = glob(pattern.c_str(), GLOB_NOSORT, nullptr, &found);
      code != 0 && code != GLOB_NOMATCH) {
    return absl::InternalError(absl::StrCat("cannot search for files that match ", pattern));
  }
  std::vector<std::string> files(found.gl_pathv, found.gl_pathv + found.gl_pathc);
  std::erase_if(files, [](const std::string& path) { return !IsRegular(path); });
  if (files.empty()) return absl::NotFoundError(absl::StrCat("no file matches ", pattern));
  return files;
}

}  // namespace

absl::StatusOr<std::vector<std::string>> FilesAt(const std::string& path) {
  using std::filesystem::file_type;
  std::error_code error;
  const file_type type = std::filesystem::status(path, error).type();
  if (type == file_type::regular) return std::vector<std::string>{path};
  if (type == file_type::none)
    return absl::ErrnoToStatus(error.value(), absl::StrCat("cannot read the attributes of ", path));
  if (type != file_type::directory && type != file_type::not_found) {
    return absl::InvalidArgumentError(absl::StrCat(path, " is neither a file nor a folder"));
  }
  const bool is_pattern =
      type == file_type::not_found && path.find_first_of("*?[") != std::string::npos;
  if (type == file_type::not_found && !is_pattern) {
    return absl::NotFoundError(absl::StrCat("no such file or folder: ", path));
  }
  absl::StatusOr<std::vector<std::string>> files = is_pattern ? Matches(path) : FilesIn(path);
  if (files.ok()) std::ranges::sort(*files);
  return files;
}

}  // namespace evenkeel
