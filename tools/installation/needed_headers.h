// Which headers must be there for the public ones to compile: those, and evenkeel's own that they
// include, at any depth.
//
//   EK_ASSIGN_OR_RETURN(Headers headers, NeededHeaders({"evenkeel/join/join.h"}, read));
//   headers["evenkeel/comm/communicator.h"] == "// The text of ..."
//
// An #include counts wherever it stands, also where the preprocessor would leave it out.
//
// Errors: those of `read`, with the file that includes the header.

#ifndef EVENKEEL_TOOLS_INSTALLATION_NEEDED_HEADERS_H_
#define EVENKEEL_TOOLS_INSTALLATION_NEEDED_HEADERS_H_

#include <functional>
#include <map>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace evenkeel {

using Headers = std::map<std::string, std::string>;  // As it is included, to its text.

absl::StatusOr<Headers> NeededHeaders(
    const std::vector<std::string>& public_headers,
    const std::function<absl::StatusOr<std::string>(const std::string&)>& read);

}  // namespace evenkeel

#endif  // EVENKEEL_TOOLS_INSTALLATION_NEEDED_HEADERS_H_
