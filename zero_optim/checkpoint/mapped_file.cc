#include "evenkeel/zero_optim/checkpoint/mapped_file.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace evenkeel {
namespace {

struct OpenFile {
  int descriptor;
  ~OpenFile() {
    if (descriptor >= 0) close(descriptor);
  }
};

absl::Status ErrnoStatus(absl::string_view action, const std::string& path) {
  const int error = errno;
  return absl::ErrnoToStatus(error, absl::StrCat(action, " ", path));
}

}  // namespace

void MappedFile::Unmap::operator()(const char* data) const {
  munmap(const_cast<char*>(data), size);
}

absl::StatusOr<MappedFile> MappedFile::Open(const std::string& path) {
  // Not blocking: opening a pipe without a writer would wait.
  const OpenFile file{open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK)};
  if (file.descriptor < 0) return ErrnoStatus("cannot open", path);
  struct stat info;
  if (fstat(file.descriptor, &info) != 0) return ErrnoStatus("cannot read the attributes of", path);
  if (!S_ISREG(info.st_mode))
    return absl::InvalidArgumentError(absl::StrCat(path, " is not a regular file"));
  const size_t size = static_cast<size_t>(info.st_size);
  if (size == 0) return MappedFile(UniqueMapping(nullptr, Unmap{}));
  void* const data = mmap(nullptr, size, PROT_READ, MAP_SHARED, file.descriptor, 0);
  if (data == MAP_FAILED)
    return ErrnoStatus(absl::StrCat("cannot map the ", size, " bytes of"), path);
  return MappedFile(UniqueMapping(static_cast<const char*>(data), Unmap{size}));
}

}  // namespace evenkeel
