#include "evenkeel/tools/installation/libraries_file.h"

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"

namespace evenkeel {

absl::StatusOr<LibrariesFile> ReadLibrariesFile(absl::string_view text) {
  try {
    const nlohmann::json json = nlohmann::json::parse(text.begin(), text.end());
    LibrariesFile libraries;
    for (const nlohmann::json& archive : json.at("archives")) {
      libraries.archives.push_back({archive.at("part").get<std::string>(), archive.at("file").get<std::string>()});
    }
    for (const nlohmann::json& header : json.at("headers")) {
      libraries.headers[header.at("include").get<std::string>()] = header.at("file").get<std::string>();
    }
    json.at("public_headers").get_to(libraries.public_headers);
    json.at("abseil").get_to(libraries.abseil);
    json.at("link_flags").get_to(libraries.link_flags);
    return libraries;
  } catch (const nlohmann::json::exception& error) {
    return absl::InvalidArgumentError(absl::StrCat("this does not list libraries: ", error.what()));
  }
}

}  // namespace evenkeel
