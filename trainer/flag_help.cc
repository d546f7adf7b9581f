#include "evenkeel/trainer/flag_help.h"

#include <gflags/gflags.h>

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"

namespace evenkeel {
namespace {

constexpr size_t kMaxColumn = 34;

struct Line {
  std::string flag;
  std::string text;
};

std::string ValueName(absl::string_view type) {
  if (type == "string") return "TEXT";
  return type == "double" ? "X" : "N";
}

std::string DefaultText(const gflags::CommandLineFlagInfo& info) {
  if (info.type == "bool") return info.default_value == "true" ? "on" : "off";
  return info.default_value.empty() ? "none" : info.default_value;
}

Line Describe(const std::string& name) {
  gflags::CommandLineFlagInfo info;
  if (!gflags::GetCommandLineFlagInfo(name.c_str(), &info)) return {name, "is not defined"};
  absl::string_view description = info.description;
  std::string value = ValueName(info.type);
  if (absl::ConsumePrefix(&description, "=")) {
    const size_t space = std::min(description.find(' '), description.size());
    value = std::string(description.substr(0, space));
    description.remove_prefix(std::min(space + 1, description.size()));
  }
  Line line{info.type == "bool" ? absl::StrCat("--[no]", name) : absl::StrCat("--", name, "=", value),
            std::string(description)};
  if (!absl::StrContains(line.text, "default")) absl::StrAppend(&line.text, " (default ", DefaultText(info), ")");
  return line;
}

}  // namespace

std::string FlagHelp(std::span<const FlagGroup> groups) {
  std::vector<std::pair<std::string, std::vector<Line>>> described;
  size_t column = 0;
  for (const FlagGroup& group : groups) {
    std::vector<Line>& lines = described.emplace_back(group.title, std::vector<Line>()).second;
    for (const std::string& flag : group.flags) {
      lines.push_back(Describe(flag));
      column = std::max(column, std::min(lines.back().flag.size(), kMaxColumn));
    }
  }
  std::string text;
  for (const auto& [title, lines] : described) {
    absl::StrAppend(&text, text.empty() ? "" : "\n", title, ":\n");
    for (const Line& line : lines) absl::StrAppendFormat(&text, "  %-*s  %s\n", column, line.flag, line.text);
  }
  return text;
}

}  // namespace evenkeel
