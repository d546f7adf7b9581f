#include "evenkeel/files/mapped_file.h"

#include <errno.h>
#include <sys/mman.h>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/files/file_io.h"

namespace evenkeel {

absl::StatusOr<MappedFile> MapFile(const std::string& path) {
  EK_ASSIGN_OR_RETURN(const RegularFile file, OpenRegularFile(path));
  const size_t size = static_cast<size_t>(file.bytes);
  if (size == 0) return std::make_shared<const absl::string_view>();
  void* const data = mmap(nullptr, size, PROT_READ, MAP_SHARED, file.fd.get(), 0);
  if (data == MAP_FAILED)
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot map the ", size, " bytes of ", path));
  return MappedFile(new absl::string_view(static_cast<const char*>(data), size),
                    [data, size](const absl::string_view* bytes) {
                      munmap(data, size);
                      delete bytes;
                    });
}

}  // namespace evenkeel
