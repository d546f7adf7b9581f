#include "evenkeel/files/mapped_file.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/base/unique_fd.h"

namespace evenkeel {

absl::StatusOr<MappedFile> MapFile(const std::string& path) {
  // Not blocking: opening a pipe without a writer would wait.
  const internal::UniqueFd file(open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
  if (!file) return absl::ErrnoToStatus(errno, absl::StrCat("cannot open ", path));
  struct stat info;
  if (fstat(file.get(), &info) != 0)
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot read the attributes of ", path));
  if (!S_ISREG(info.st_mode))
    return absl::InvalidArgumentError(absl::StrCat(path, " is not a regular file"));
  const size_t size = static_cast<size_t>(info.st_size);
  if (size == 0) return std::make_shared<const absl::string_view>();
  void* const data = mmap(nullptr, size, PROT_READ, MAP_SHARED, file.get(), 0);
  if (data == MAP_FAILED)
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot map the ", size, " bytes of ", path));
  return MappedFile(new absl::string_view(static_cast<const char*>(data), size),
                    [data, size](const absl::string_view* bytes) {
                      munmap(data, size);
                      delete bytes;
                    });
}

}  // namespace evenkeel
