// Merges the flight records of a job's ranks into one account.
//
//   bazel run //tools:flight -- /tmp/job/flight          # a folder with *.json, or files
//
//   group world (tcp): records of 3 of 4 ranks; MISSING: rank 2
//   ...
//   channel user: THE RANKS DISAGREE at #412
//     > ranks 0,3: all_reduce bucket 2/5 float32[1048576] sum, open for 12.3 s
//     > rank 1: barrier (user), open for 12.1 s, issued 0.21 s after the first
//
// A file that is no such record is refused with a sentence on standard error; the others are merged
// all the same.

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/tools/flight_account.h"
#include "evenkeel/tools/program.h"

namespace evenkeel {
namespace {

namespace fs = std::filesystem;

constexpr char kUsage[] = R"($0: merges the flight records of a job's ranks into one account.

  $0 [--json] FILE_OR_FOLDER...        of a folder: every *.json in it

It says, for each group of ranks: of which ranks there is no record; how each rank's group ended and what its threads
wait for; for each channel the first place at which the ranks have different collectives, or to which some have not
come, and where each rank is; and which operations have failed, with status and time. --json: the same as data.

Ranks write records when their group fails and a folder is named for that (--flight of the launcher and of
the trainer, EVENKEEL_FLIGHT), on demand, or on a signal: kill -USR1 to a rank of the trainer, or to what has
started the ranks, and the job goes on; a program of your own calls DumpFlightOnSignal() (comm/flight_signal.h)
for that.

Exit code: 0, or 1 if a file was refused or there was none.
)";

absl::StatusOr<std::vector<std::string>> FilesOf(const std::string& path) {
  std::error_code error;
  if (!fs::is_directory(path, error)) return std::vector<std::string>{path};
  std::vector<std::string> files;
  for (fs::directory_iterator entry(path, error), end; !error && entry != end;
       entry.increment(error)) {
    const std::string name = entry->path().filename().string();
    if (absl::EndsWith(name, ".json"))
      files.push_back(absl::StrCat(path, absl::EndsWith(path, "/") ? "" : "/", name));
  }
  if (error) return absl::UnavailableError(error.message());
  if (files.empty()) return absl::NotFoundError("the folder contains no *.json file");
  std::sort(files.begin(), files.end());
  return files;
}

absl::StatusOr<FlightDump> ReadDump(const std::string& file) {
  EK_ASSIGN_OR_RETURN(const std::string text, ReadInput(file));
  EK_ASSIGN_OR_RETURN(FlightDump dump, ReadFlightDump(text));
  dump.file = file;
  return dump;
}

struct Arguments {
  bool is_help = false, is_json = false;
  std::vector<std::string> paths;
};

absl::StatusOr<Arguments> Parse(const std::vector<std::string>& words) {
  Arguments arguments;
  for (const std::string& word : words) {
    if (word == "--help" || word == "-h") {
      arguments.is_help = true;
    } else if (word == "--json") {
      arguments.is_json = true;
    } else if (absl::StartsWith(word, "-")) {
      return absl::InvalidArgumentError(absl::StrCat("unknown flag ", word, "; see --help"));
    } else {
      arguments.paths.push_back(word);
    }
  }
  if (arguments.paths.empty() && !arguments.is_help) {
    return absl::InvalidArgumentError(
        "no record is given; pass the ranks' records as files or as a folder; see --help");
  }
  return arguments;
}

void Refuse(const std::string& file, const absl::Status& why, std::vector<RefusedFile>& refused) {
  refused.push_back({file, std::string(why.message())});
  std::fprintf(stderr, "%s: %s: %s\n", program_invocation_short_name, file.c_str(),
               refused.back().why.c_str());
}

// The program's exit code.
absl::StatusOr<int> Run(const std::vector<std::string>& words) {
  EK_ASSIGN_OR_RETURN(const Arguments arguments, Parse(words));
  if (arguments.is_help) {
    EK_RETURN_IF_ERROR(Print(NameIn(kUsage)));
    return EXIT_SUCCESS;
  }
  EK_RETURN_IF_ERROR(EnterUserFolder());
  std::vector<FlightDump> dumps;
  std::vector<RefusedFile> refused;
  for (const std::string& path : arguments.paths) {
    const absl::StatusOr<std::vector<std::string>> files = FilesOf(path);
    if (!files.ok()) Refuse(path, files.status(), refused);
    for (const std::string& file : files.ok() ? *files : std::vector<std::string>()) {
      absl::StatusOr<FlightDump> dump = ReadDump(file);
      if (dump.ok()) dumps.push_back(*std::move(dump));
      if (!dump.ok()) Refuse(file, dump.status(), refused);
    }
  }
  const std::vector<GroupAccount> accounts = AccountFor(std::move(dumps));
  std::string out = arguments.is_json ? ToJson(accounts, refused) : "";
  for (const GroupAccount& account : accounts) {
    if (!arguments.is_json) absl::StrAppend(&out, ToText(account));
  }
  EK_RETURN_IF_ERROR(Print(out));
  return refused.empty() ? EXIT_SUCCESS : EXIT_FAILURE;
}

}  // namespace
}  // namespace evenkeel

int main(int argc, char** argv) {
  return evenkeel::RunProgram([&] { return evenkeel::Run({argv + 1, argv + argc}); });
}
