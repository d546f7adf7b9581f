#include "evenkeel/tools/installation/prefix.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <optional>
#include <set>
#include <system_error>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/tools/program.h"

namespace evenkeel {
namespace {

namespace fs = std::filesystem;

using Paths = std::set<std::string>;

absl::Status Failed(const fs::path& path, int error) {
  return absl::ErrnoToStatus(error, path.string());
}

// Nothing if there is no such file.
absl::StatusOr<std::optional<std::string>> ReadIfThere(const fs::path& path) {
  std::error_code error;
  const bool exists = fs::exists(path, error);
  if (error) return Failed(path, error.value());
  if (!exists) return std::nullopt;
  EK_ASSIGN_OR_RETURN(std::string content, Annotate(ReadInput(path), path.string()));
  return content;
}

// Under its name a file has its old content, and then the new one.
absl::Status Replace(const fs::path& path, absl::string_view content, bool is_program = false) {
  std::error_code error;
  fs::create_directories(path.parent_path(), error);
  if (error) return Failed(path.parent_path(), error.value());
  const fs::path unfinished = absl::StrCat(path.string(), ".unfinished-", getpid());
  errno = 0;
  std::ofstream file(unfinished, std::ios::binary);
  file.write(content.data(), static_cast<std::streamsize>(content.size()));
  file.close();
  absl::Status status = file ? absl::OkStatus() : Failed(path, errno == 0 ? EIO : errno);
  if (status.ok() && is_program) {  // Executable for its readers.
    const fs::perms readers = fs::status(unfinished, error).permissions() & fs::perms(0444);
    fs::permissions(unfinished, fs::perms(unsigned(readers) >> 2), fs::perm_options::add, error);
    if (error) status = Failed(path, error.value());
  }
  if (status.ok() && std::rename(unfinished.c_str(), path.c_str()) != 0)
    status = Failed(path, errno);
  if (!status.ok()) unlink(unfinished.c_str());
  return status;
}

std::string ListOf(const Paths& paths) { return absl::StrCat(absl::StrJoin(paths, "\n"), "\n"); }

// Returns the files of an earlier installation.
absl::StatusOr<Paths> InstalledBefore(const fs::path& prefix) {
  const fs::path list = prefix / kInstalledFilesPath;
  EK_ASSIGN_OR_RETURN(const std::optional<std::string> text, ReadIfThere(list));
  Paths paths;
  if (!text.has_value()) return paths;
  for (const absl::string_view line : absl::StrSplit(*text, '\n', absl::SkipEmpty())) {
    if (!IsInstalledPath(line)) {
      return absl::DataLossError(absl::StrCat(
          list.string(), " names \"", line,
          "\", which evenkeel does not install; the folder is left unchanged, pass another one"));
    }
    paths.emplace(line);
  }
  return paths;
}

absl::StatusOr<Paths> PathsOf(const std::vector<FileToInstall>& files) {
  Paths paths;
  for (const FileToInstall& file : files) {
    if (!IsInstalledPath(file.path))
      return absl::InvalidArgumentError(
          absl::StrCat(file.path, " is not a path that evenkeel installs to (internal error)"));
    if (!paths.insert(file.path).second)
      return absl::InvalidArgumentError(
          absl::StrCat(file.path, " is listed twice (internal error)"));
  }
  return paths;
}

absl::Status CheckThatNoneIsSomebodyElses(const fs::path& prefix, const Paths& paths,
                                          const Paths& before) {
  for (const std::string& path : paths) {
    std::error_code error;
    const fs::file_status there = fs::symlink_status(prefix / path, error);
    if (!fs::exists(there) || (before.contains(path) && !fs::is_directory(there))) continue;
    return absl::FailedPreconditionError(
        absl::StrCat((prefix / path).string(),
                     " exists, but no earlier installation of evenkeel has created it; remove it, "
                     "or pass another folder"));
  }
  return absl::OkStatus();
}

// The file, and the folders that are empty without it.
absl::Status Remove(const fs::path& prefix, const std::string& path) {
  if (unlink((prefix / path).c_str()) != 0 && errno != ENOENT && errno != ENOTDIR)
    return Failed(prefix / path, errno);
  for (fs::path folder = fs::path(path).parent_path(); !folder.empty();
       folder = folder.parent_path()) {
    if (rmdir((prefix / folder).c_str()) != 0) break;
  }
  return absl::OkStatus();
}

}  // namespace

bool IsInstalledPath(absl::string_view path) {
  static constexpr absl::string_view kBeginnings[] = {
      kProgramPath,        "include/evenkeel/",       "lib/libevenkeel_", "lib/cmake/evenkeel/",
      "libexec/evenkeel/", "lib/pkgconfig/evenkeel.", "share/evenkeel/"};
  if (path == kInstalledFilesPath) return false;  // It is there of itself.
  if (std::none_of(
          std::begin(kBeginnings), std::end(kBeginnings),
          [&](absl::string_view beginning) { return absl::StartsWith(path, beginning); })) {
    return false;
  }
  for (const absl::string_view name : absl::StrSplit(path, '/')) {
    if (name.empty() || name == "." || name == "..") return false;
  }
  return !absl::StrContains(path, '\n') && !absl::StrContains(path, '\0');
}

absl::StatusOr<InstallSummary> InstallFiles(const std::string& prefix,
                                            const std::vector<FileToInstall>& files) {
  EK_ASSIGN_OR_RETURN(const Paths paths, PathsOf(files));
  EK_ASSIGN_OR_RETURN(const Paths before, InstalledBefore(prefix));
  EK_RETURN_IF_ERROR(CheckThatNoneIsSomebodyElses(prefix, paths, before));

  Paths all = before;
  all.insert(paths.begin(), paths.end());
  const fs::path list = fs::path(prefix) / kInstalledFilesPath;
  if (all != before) EK_RETURN_IF_ERROR(Replace(list, ListOf(all)));

  InstallSummary summary;
  for (const FileToInstall& file : files) {
    const fs::path path = fs::path(prefix) / file.path;
    EK_ASSIGN_OR_RETURN(const std::optional<std::string> there, ReadIfThere(path));
    if (there != file.content)
      EK_RETURN_IF_ERROR(Replace(path, file.content, absl::StartsWith(file.path, kProgramPath)));
    ++(there == file.content ? summary.unchanged : summary.written);
  }
  for (const std::string& path : before) {
    if (paths.contains(path)) continue;
    EK_RETURN_IF_ERROR(Remove(prefix, path));
    ++summary.removed;
  }
  if (all != paths) EK_RETURN_IF_ERROR(Replace(list, ListOf(paths)));
  return summary;
}

}  // namespace evenkeel
