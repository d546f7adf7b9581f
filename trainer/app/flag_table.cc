#include "evenkeel/trainer/app/flag_table.h"

#include <gflags/gflags.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <iostream>
#include <numeric>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/strip.h"
#include "evenkeel/comm/status.h"

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

Line Describe(const char* name) {
  const gflags::CommandLineFlagInfo info = gflags::GetCommandLineFlagInfoOrDie(name);
  absl::string_view description = info.description;
  std::string value = ValueName(info.type);
  if (absl::ConsumePrefix(&description, "=")) {
    const size_t space = std::min(description.find(' '), description.size());
    value = std::string(description.substr(0, space));
    description.remove_prefix(std::min(space + 1, description.size()));
  }
  Line line{
      info.type == "bool" ? absl::StrCat("--[no]", name) : absl::StrCat("--", name, "=", value),
      std::string(description)};
  if (!absl::StrContains(line.text, "default"))
    absl::StrAppend(&line.text, " (default ", DefaultText(info), ")");
  return line;
}

// Returns the value of a boolean flag of gflags.
bool IsSet(const char* flag) {
  std::string value;
  return gflags::GetCommandLineOption(flag, &value) && value == "true";
}

// Help, in all spellings of gflags.
bool WantsHelp() {
  const auto spellings = {"help", "helpfull", "helpshort", "helppackage", "helpxml"};
  return std::ranges::any_of(spellings, IsSet);
}

// Returns the least number of characters to insert, delete or replace.
size_t EditDistance(absl::string_view a, absl::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = std::exchange(row[0], i + 1);
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t replaced = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({replaced, row[j] + 1, row[j + 1] + 1});
    }
  }
  return row.back();
}

// Returns the type of the flag --name or --noname; "" if there is none.
std::string TypeOf(absl::string_view name) {
  gflags::CommandLineFlagInfo info;
  if (gflags::GetCommandLineFlagInfo(std::string(name).c_str(), &info)) return info.type;
  if (!absl::ConsumePrefix(&name, "no")) return "";
  const bool is_known = gflags::GetCommandLineFlagInfo(std::string(name).c_str(), &info);
  return is_known && info.type == "bool" ? info.type : "";
}

}  // namespace

bool ParseCount(absl::string_view text, int64_t& count) {
  // SimpleAtoi would take "+3" and " 3" as well.
  return !text.empty() && absl::ascii_isdigit(text[0]) && absl::SimpleAtoi(text, &count);
}

absl::Status FlagTable::CheckNames(absl::Span<char* const> arguments) const {
  // gflags ignores unknown flags that it names.
  const auto names_unknown = [](absl::string_view argument) {
    return absl::StartsWith(argument, "--undefok") || absl::StartsWith(argument, "-undefok");
  };
  if (std::ranges::any_of(arguments, names_unknown)) return absl::OkStatus();
  bool is_value = false;  // The next argument is the value of this flag.
  for (absl::string_view argument : arguments) {
    if (argument == "--") break;
    if (std::exchange(is_value, false) || !absl::ConsumePrefix(&argument, "-") || argument.empty())
      continue;
    absl::ConsumePrefix(&argument, "-");
    const absl::string_view name = argument.substr(0, argument.find('='));
    const std::string type = TypeOf(name);
    is_value = type != "bool" && name.size() == argument.size();
    if (!type.empty()) continue;
    const size_t most_edits = std::min<size_t>(2, name.size() / 2);
    std::pair<size_t, absl::string_view> nearest = {most_edits + 1, ""};
    for (const Flags& group : groups_) {
      for (const char* flag : group.names)
        nearest = std::min(nearest, {EditDistance(name, flag), flag});
    }
    return absl::InvalidArgumentError(absl::StrCat(
        "unknown flag --", name, "; ",
        nearest.second.empty() ? "" : absl::StrCat("did you mean --", nearest.second, "? "),
        "see --help"));
  }
  return absl::OkStatus();
}

template <typename Value>
void FlagTable::Add(const char* name, Value& value, const char* help) {
  const auto initial = std::make_shared<Value>(value);
  gflags::FlagRegisterer(name, help, /*filename=*/"", &value, initial.get());
  defaults_.push_back(initial);
  groups_.back().names.push_back(name);
}

template void FlagTable::Add(const char*, bool&, const char*);
template void FlagTable::Add(const char*, int32_t&, const char*);
template void FlagTable::Add(const char*, int64_t&, const char*);
template void FlagTable::Add(const char*, uint64_t&, const char*);
template void FlagTable::Add(const char*, double&, const char*);
template void FlagTable::Add(const char*, std::string&, const char*);

bool FlagTable::IsGiven(const char* name) {
  return !gflags::GetCommandLineFlagInfoOrDie(name).is_default;
}

absl::StatusOr<bool> FlagTable::Parse(absl::string_view summary, int argc, char** argv) {
  if (const char* folder = std::getenv("BUILD_WORKING_DIRECTORY");
      folder != nullptr && chdir(folder) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot change to the folder ", folder));
  }
  EK_RETURN_IF_ERROR(CheckNames(absl::MakeSpan(argv + 1, argc - 1)));
  gflags::ParseCommandLineNonHelpFlags(&argc, &argv, /*remove_flags=*/true);
  if (WantsHelp()) {
    std::cout << absl::StrReplaceAll(summary, {{"$0", program_invocation_short_name}}) << Help();
    return false;
  }
  if (IsSet("version")) return absl::InvalidArgumentError("unknown flag --version; see --help");
  if (argc > 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("unexpected argument \"", argv[1], "\"; see --help"));
  }
  for (const auto& take : take_) take();
  return true;
}

std::string FlagTable::Help() const {
  std::vector<std::pair<const char*, std::vector<Line>>> described;
  size_t column = 0;
  for (const Flags& group : groups_) {
    std::vector<Line>& lines = described.emplace_back(group.title, std::vector<Line>()).second;
    for (const char* flag : group.names) {
      lines.push_back(Describe(flag));
      column = std::max(column, std::min(lines.back().flag.size(), kMaxColumn));
    }
  }
  std::string text;
  for (const auto& [title, lines] : described) {
    absl::StrAppend(&text, text.empty() ? "" : "\n", title, ":\n");
    for (const Line& line : lines)
      absl::StrAppendFormat(&text, "  %-*s  %s\n", column, line.flag, line.text);
  }
  return text;
}

}  // namespace evenkeel
