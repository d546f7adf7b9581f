#include "evenkeel/tools/installation/needed_headers.h"

#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

namespace evenkeel {
namespace {

// evenkeel's header that a line includes, or "".
std::string IncludedBy(absl::string_view line) {
  line = absl::StripLeadingAsciiWhitespace(line);
  if (!absl::ConsumePrefix(&line, "#")) return "";
  line = absl::StripLeadingAsciiWhitespace(line);
  if (!absl::ConsumePrefix(&line, "include")) return "";
  line = absl::StripLeadingAsciiWhitespace(line);
  if (!absl::ConsumePrefix(&line, "\"") && !absl::ConsumePrefix(&line, "<")) return "";
  if (!absl::StartsWith(line, "evenkeel/")) return "";
  return std::string(line.substr(0, line.find_first_of("\">")));
}

}  // namespace

absl::StatusOr<Headers> NeededHeaders(const std::vector<std::string>& public_headers,
                                      const std::function<absl::StatusOr<std::string>(const std::string&)>& read) {
  std::map<std::string, std::string> to_read;  // Each with who includes it.
  for (const std::string& header : public_headers) to_read[header] = "users";

  Headers headers;
  while (!to_read.empty()) {
    const auto [header, user] = *to_read.begin();
    to_read.erase(to_read.begin());
    absl::StatusOr<std::string> text = read(header);
    if (!text.ok()) {
      return absl::Status(text.status().code(),
                          absl::StrCat(header, ", included by ", user, ": ", text.status().message()));
    }
    const std::string& kept = headers[header] = *std::move(text);
    for (const absl::string_view line : absl::StrSplit(kept, '\n')) {
      const std::string included = IncludedBy(line);
      if (!included.empty() && !headers.contains(included)) to_read[included] = header;
    }
  }
  return headers;
}

}  // namespace evenkeel
