#include "evenkeel/tools/program.h"

#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <system_error>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "gflags/gflags.h"

namespace evenkeel {
namespace {

constexpr size_t kMaxInputBytes = size_t{1} << 30;

struct FileCloser {
  void operator()(std::FILE* file) const { std::fclose(file); }
};

}  // namespace

int RunProgram(absl::FunctionRef<absl::StatusOr<int>()> run) {
  absl::StatusOr<int> code = 1;
  try {
    code = run();
  } catch (const std::exception& error) {
    code = absl::InternalError(error.what());
  }
  if (code.ok()) return *code;
  const std::string line =
      absl::StrCat(program_invocation_short_name, ": ", code.status().message(), "\n");
  std::fputs(line.c_str(), stderr);
  return EXIT_FAILURE;
}

std::string NameIn(absl::string_view usage) {
  return absl::StrReplaceAll(usage, {{"$0", program_invocation_short_name}});
}

absl::Status EnterUserFolder() {
  const char* const folder = std::getenv("BUILD_WORKING_DIRECTORY");
  if (folder == nullptr || chdir(folder) == 0) return absl::OkStatus();
  return absl::ErrnoToStatus(errno, absl::StrCat("cannot change to the folder ", folder));
}

bool PrintsHelp(const char* usage, int argc, char** argv) {
  for (int i = 1; i < argc && argv[i] != absl::string_view("--"); ++i) {
    const absl::string_view argument = argv[i];
    if (argument != "--help" && argument != "-help" && argument != "-h") continue;
    std::fputs(NameIn(usage).c_str(), stdout);
    return true;
  }
  return false;
}

absl::Status ParseFlags(const char* usage, int argc, char** argv) {
  gflags::SetUsageMessage(usage);
  gflags::ParseCommandLineFlags(&argc, &argv, /*remove_flags=*/true);
  if (argc <= 1) return EnterUserFolder();
  return absl::InvalidArgumentError(absl::StrCat("\"", argv[1], "\" is not a flag; see --help"));
}

std::string EnvironmentVariable(const char* name) {
  const char* const value = std::getenv(name);
  return value == nullptr ? "" : value;
}

std::vector<std::string> ListOf(absl::string_view text) {
  return absl::StrSplit(text, ',', absl::SkipEmpty());
}

absl::StatusOr<std::string> ReadInput(const std::string& path) {
  const std::unique_ptr<std::FILE, FileCloser> opened(
      path.empty() ? nullptr : std::fopen(path.c_str(), "rb"));
  std::FILE* const file = path.empty() ? stdin : opened.get();
  if (file == nullptr) return absl::ErrnoToStatus(errno, "cannot be opened");
  std::string text;
  char buffer[1 << 16];
  while (const size_t count = std::fread(buffer, 1, sizeof(buffer), file)) {
    text.append(buffer, count);
    if (text.size() > kMaxInputBytes) return absl::InvalidArgumentError("larger than 1 GiB");
  }
  if (std::ferror(file) != 0) return absl::ErrnoToStatus(errno, "cannot be read");
  return text;
}

absl::Status Print(absl::string_view text) {
  const bool is_written = std::fwrite(text.data(), 1, text.size(), stdout) == text.size();
  if (is_written && std::fflush(stdout) == 0) return absl::OkStatus();
  return absl::ErrnoToStatus(errno, "cannot write the output");
}

absl::StatusOr<std::unique_ptr<TemporaryFolder>> TemporaryFolder::Create(
    absl::string_view program) {
  std::error_code error;
  std::string path =
      absl::StrCat(std::filesystem::temp_directory_path(error).string(), "/", program, ".XXXXXX");
  if (error || mkdtemp(path.data()) == nullptr)
    return absl::UnavailableError(absl::StrCat("cannot create ", path));
  return std::make_unique<TemporaryFolder>(std::move(path));
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

}  // namespace evenkeel
