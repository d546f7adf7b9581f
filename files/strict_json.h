// JSON that another program wrote: no name twice in an object, no deeper nesting and no more bytes
// than expected.
//
//   EK_ASSIGN_OR_RETURN(const nlohmann::json header,
//                       ParseStrictJson(bytes, /*max_depth=*/3, "the header"));
//   EK_ASSIGN_OR_RETURN(const nlohmann::json config,
//                       ReadStrictJson("gpt2/config.json", /*max_depth=*/16));
//
// All JSON that a program reads comes through here: the library's own parser keeps the last of two
// equal names, and copying or printing its result recurses once per level.
//
// Errors: InvalidArgument, in which `what`, or the path, names the text; ReadFile()'s own.

#ifndef EVENKEEL_FILES_STRICT_JSON_H_
#define EVENKEEL_FILES_STRICT_JSON_H_

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace evenkeel::internal {

// A parsed text takes some 20 times its bytes.
inline constexpr int64_t kMaxJsonBytes = int64_t{256} << 20;

// A clone without Git LFS has a text that begins with this in place of a large file.
inline constexpr char kLfsPointer[] = "version https://git-lfs";

enum class JsonRoot { kObject, kAny };
absl::StatusOr<nlohmann::json> ParseStrictJson(absl::string_view text, int max_depth,
                                               absl::string_view what,
                                               JsonRoot root = JsonRoot::kObject);
absl::StatusOr<nlohmann::json> ReadStrictJson(const std::string& path, int max_depth);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_FILES_STRICT_JSON_H_
