#include "evenkeel/tools/installation/needed_headers.h"

#include <regex>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace evenkeel {
namespace {

// evenkeel's header that a line includes, or "".
std::string IncludedBy(const std::string& line) {
  static const std::regex kInclude(R"(^\s*#\s*include\s*["<](evenkeel/[^">]*))");
  std::smatch match;
  return std::regex_search(line, match, kInclude) ? match[1].str() : "";
}

}  // namespace

absl::StatusOr<Headers> NeededHeaders(
    const std::vector<std::string>& public_headers,
    const std::function<absl::StatusOr<std::string>(const std::string&)>& read) {
  std::map<std::string, std::string> to_read;  // Each with the file that includes it.
  for (const std::string& header : public_headers) to_read[header] = "users";

  Headers headers;
  while (!to_read.empty()) {
    const auto [header, user] = *to_read.begin();
    to_read.erase(to_read.begin());
    absl::StatusOr<std::string> text = read(header);
    if (!text.ok()) {
      return absl::Status(text.status().code(), absl::StrCat(header, ", included by ", user, ": ",
                                                             text.status().message()));
    }
    const std::string& kept = headers[header] = *std::move(text);
    for (const std::string& line : std::vector<std::string>(absl::StrSplit(kept, '\n'))) {
      const std::string included = IncludedBy(line);
      if (!included.empty() && !headers.contains(included)) to_read[included] = header;
    }
  }
  return headers;
}

}  // namespace evenkeel
