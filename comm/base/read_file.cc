#include "evenkeel/comm/base/read_file.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include <cstring>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/base/unique_fd.h"

namespace evenkeel::internal {
namespace {

// Above any caller's files; an endless device is not read for ever.
constexpr size_t kMaxFile = size_t{256} << 20;

}  // namespace

absl::Status FileError(absl::string_view path) {
  const int error = errno;
  const std::string text = absl::StrCat(path, ": ", std::strerror(error));
  switch (error) {
    case ENOENT:
      return absl::NotFoundError(text);
    case EEXIST:
      return absl::AlreadyExistsError(text);
    case EACCES:
    case EPERM:
      return absl::PermissionDeniedError(text);
    default:
      return absl::UnavailableError(text);
  }
}

absl::StatusOr<std::string> ReadFile(const std::string& path, Links links) {
  const UniqueFd fd(
      open(path.c_str(), O_RDONLY | O_CLOEXEC | (links == Links::kRefuse ? O_NOFOLLOW : 0)));
  if (!fd) return FileError(path);
  std::string content;
  char chunk[4096];
  while (content.size() <= kMaxFile) {
    const ssize_t got = read(fd.get(), chunk, sizeof(chunk));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return FileError(path);
    if (got == 0) return content;
    content.append(chunk, got);
  }
  return absl::InvalidArgumentError(absl::StrCat(path, ": larger than ", kMaxFile, " bytes"));
}

}  // namespace evenkeel::internal
