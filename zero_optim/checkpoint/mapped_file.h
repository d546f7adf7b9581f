// A file mapped into memory; the system reads only the pages that are accessed.
//
//   EK_ASSIGN_OR_RETURN(const MappedFile file, MappedFile::Open("data/fineweb_train_000001.bin"));
//   file.bytes().size();
//
// A file must not become shorter while it is mapped: an access beyond its new end raises SIGBUS.
// Changes of its bytes meanwhile may be visible or not.
//
// Threads:   immutable.
// Ownership: bytes() is valid as long as the MappedFile, also after it was moved.
// Errors:    the system's own (NotFound, PermissionDenied, ...), always with the path;
//            InvalidArgument for a folder, a device or a pipe.

#ifndef EVENKEEL_ZERO_OPTIM_CHECKPOINT_MAPPED_FILE_H_
#define EVENKEEL_ZERO_OPTIM_CHECKPOINT_MAPPED_FILE_H_

#include <cstddef>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace evenkeel {

class MappedFile {
 public:
  static absl::StatusOr<MappedFile> Open(const std::string& path);

  absl::string_view bytes() const { return {data_.get(), data_.get_deleter().size}; }

 private:
  struct Unmap {
    size_t size = 0;
    void operator()(const char* data) const;
  };
  using UniqueMapping = std::unique_ptr<const char, Unmap>;

  explicit MappedFile(UniqueMapping data) : data_(std::move(data)) {}

  UniqueMapping data_;  // None for an empty file.
};

}  // namespace evenkeel

#endif  // EVENKEEL_ZERO_OPTIM_CHECKPOINT_MAPPED_FILE_H_
