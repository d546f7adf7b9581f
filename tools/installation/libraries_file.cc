#include "evenkeel/tools/installation/libraries_file.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/files/strict_json.h"
#include "nlohmann/json.hpp"

namespace evenkeel {

NLOHMANN_DEFINE_TYPE_NON_INTRUSIVE(LibrariesFile::Archive, part, file)

absl::StatusOr<LibrariesFile> ReadLibrariesFile(absl::string_view text) {
  try {
    EK_ASSIGN_OR_RETURN(const nlohmann::json json,
                        internal::ParseStrictJson(text, /*max_depth=*/8, "the list of libraries"));
    LibrariesFile libraries;
    json.at("archives").get_to(libraries.archives);
    for (const nlohmann::json& header : json.at("headers")) {
      libraries.headers[header.at("include").get<std::string>()] = header.at("file");
    }
    json.at("public_headers").get_to(libraries.public_headers);
    json.at("programs").get_to(libraries.programs);
    json.at("abseil").get_to(libraries.abseil);
    json.at("link_flags").get_to(libraries.link_flags);
    return libraries;
  } catch (const nlohmann::json::exception& error) {
    return absl::InvalidArgumentError(
        absl::StrCat("the text is not a list of libraries: ", error.what()));
  }
}

}  // namespace evenkeel
