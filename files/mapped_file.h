// Files mapped into memory; the system reads only the pages that are accessed.
//
//   EK_ASSIGN_OR_RETURN(const MappedFile file, MapFile("data/fineweb_train_000001.bin"));
//   file->size();
//
// A file must not become shorter while it is mapped: an access beyond its new end raises SIGBUS.
// Changes of its bytes meanwhile may be visible or not.
//
// Threads:   immutable.
// Ownership: the last MappedFile that points to the bytes unmaps them.
// Errors:    the system's own (NotFound, PermissionDenied, ...), always with the path;
//            InvalidArgument for a folder, a device or a pipe.

#ifndef EVENKEEL_FILES_MAPPED_FILE_H_
#define EVENKEEL_FILES_MAPPED_FILE_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace evenkeel {

using MappedFile = std::shared_ptr<const absl::string_view>;  // Not null.

absl::StatusOr<MappedFile> MapFile(const std::string& path);

}  // namespace evenkeel

#endif  // EVENKEEL_FILES_MAPPED_FILE_H_
