// Runs the program as people run it.

#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <sstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace evenkeel {
namespace {

using Json = nlohmann::json;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;

std::string NewFolder() {
  std::string pattern = testing::TempDir() + "/flightXXXXXX";
  return mkdtemp(pattern.data());
}

void WriteFile(const std::string& path, absl::string_view text) {
  std::ofstream(path, std::ios::binary) << text;
}

std::string ReadFile(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path, std::ios::binary).rdbuf();
  return text.str();
}

struct Result {
  int exit_code = -1;
  std::string out, error;
};

Result RunFlight(const std::string& args, const std::string& program = "tools/flight") {
  const std::string folder = NewFolder();
  const std::string command =
      absl::StrCat(program, " ", args, " >'", folder, "/out' 2>'", folder, "/error'");
  const int status = std::system(command.c_str());
  return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, ReadFile(folder + "/out"),
          ReadFile(folder + "/error")};
}

TEST(FlightTest, CallsItselfByTheNameByWhichItIsStarted) {
  const std::string installed = NewFolder() + "/evenkeel-flight";
  ASSERT_EQ(symlink(realpath("tools/flight", nullptr), installed.c_str()), 0);
  const Result help = RunFlight("--help", installed);
  EXPECT_THAT(help.out, AllOf(testing::StartsWith("evenkeel-flight: merges"),
                              HasSubstr("\n  evenkeel-flight [--json] "), Not(HasSubstr("$0"))));
  EXPECT_THAT(RunFlight("/no/such", installed).error,
              testing::StartsWith("evenkeel-flight: /no/such: "));
  EXPECT_THAT(RunFlight("--no_such", installed).error, testing::StartsWith("evenkeel-flight: "));
  EXPECT_THAT(RunFlight("--help").out, testing::StartsWith("flight: merges"));
}

// As a rank writes it that waits in a barrier after one all_reduce.
std::string RecordOf(int rank, absl::string_view text) {
  return absl::StrCat(R"({"version":1,"group":"world","rank":)", rank,
                      R"(,"world_size":3,"backend":"tcp",
"time":"2026-11-20T14:05:06.123456Z","status":{"code":"OK","message":""},"waits":["#1 )",
                      text, R"("],
"channels":[{"id":"0a","name":"user","position":2}],
"entries":[{"number":1,"channel":"0a","sequence":1,"kind":"barrier","dtype":"float32","count":0,"op":"sum","root":-1,
"role":"user","index":-1,"index_count":0,"text":")",
                      text, R"(","hash":")", text, R"(","issued_us":1795183506000000,
"ended_us":null,"state":"open","code":"OK"}]})");
}

std::string FolderOfTwo() {
  const std::string folder = NewFolder();
  WriteFile(folder + "/world.rank0.json", RecordOf(0, "barrier (user)"));
  WriteFile(folder + "/world.rank1.json", RecordOf(1, "broadcast float32[1] root 0"));
  WriteFile(folder + "/notes.txt", "not a record");
  return folder;
}

TEST(FlightTest, MergesAFolder) {
  const Result result = RunFlight(FolderOfTwo());
  EXPECT_EQ(result.exit_code, 0) << result.error;
  EXPECT_EQ(result.error, "");
  EXPECT_THAT(result.out, AllOf(HasSubstr("records of 2 of 3 ranks; MISSING: rank 2"),
                                HasSubstr("THE RANKS DISAGREE at #1"),
                                HasSubstr("> rank 0: barrier (user), open for"),
                                HasSubstr("> rank 1: broadcast float32[1] root 0, open for")));
}

TEST(FlightTest, RefusesABrokenFileAndMergesTheOthers) {
  const std::string folder = FolderOfTwo();
  WriteFile(folder + "/world.rank2.json", "\x01garbage");
  const Result result = RunFlight(folder + "/");
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_EQ(result.error,
            absl::StrCat("flight: ", folder,
                         "/world.rank2.json: the input is not JSON at line 1, column 1\n"));
  EXPECT_THAT(result.out, HasSubstr("records of 2 of 3 ranks; MISSING: rank 2"));
}

TEST(FlightTest, TakesFilesAndSpeaksJson) {
  const std::string folder = FolderOfTwo();
  const Result result =
      RunFlight(absl::StrCat("--json ", folder, "/world.rank0.json ", folder, "/nothing.json"));
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.error, HasSubstr("nothing.json: cannot be opened: No such file"));
  const Json json = Json::parse(result.out, nullptr, /*allow_exceptions=*/false);
  ASSERT_FALSE(json.is_discarded()) << result.out;
  EXPECT_EQ(json.at("groups").at(0).at("missing"), Json({1, 2}));
  EXPECT_THAT(json.at("refused").at(0).at("file").get<std::string>(), HasSubstr("nothing.json"));
}

TEST(FlightTest, SaysWhatItNeeds) {
  EXPECT_THAT(RunFlight("--help").out, HasSubstr("FILE_OR_FOLDER"));
  EXPECT_EQ(RunFlight("-h").out, RunFlight("--help").out);
  EXPECT_THAT(RunFlight("").error, HasSubstr("pass the ranks' records as files or as a folder"));
  EXPECT_THAT(RunFlight("--jsno x").error, HasSubstr("unknown flag --jsno"));
  const Result empty = RunFlight(NewFolder());
  EXPECT_EQ(empty.exit_code, 1);
  EXPECT_THAT(empty.error, HasSubstr("contains no *.json"));
  EXPECT_THAT(empty.out, Not(HasSubstr("group")));
}

}  // namespace
}  // namespace evenkeel
