// Runs the binary as a person does. That programs build against what it installs is for
// tests/consumer_cmake to say.

#include <sys/wait.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace {

namespace fs = std::filesystem;

using testing::ContainsRegex;
using testing::HasSubstr;
using testing::Not;

struct Outcome {
  int code = -1;
  std::string output;  // Standard output and error.
};

Outcome RunCommand(const std::string& command) {
  Outcome outcome;
  FILE* pipe = popen(absl::StrCat(command, " 2>&1").c_str(), "r");
  char buffer[4096];
  for (size_t size; (size = fread(buffer, 1, sizeof(buffer), pipe)) > 0;)
    outcome.output.append(buffer, size);
  const int status = pclose(pipe);
  outcome.code = WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status);
  return outcome;
}

Outcome RunInstall(const std::string& arguments, const std::string& environment = "") {
  return RunCommand(absl::StrCat(environment, " tools/install ", arguments));
}

std::string Folder(const std::string& name) {
  return absl::StrCat(std::getenv("TEST_TMPDIR"), "/", name);
}

bool HasElfHeader(const std::string& path) {
  char begin[4] = {};
  std::ifstream(path, std::ios::binary).read(begin, sizeof(begin));
  return std::string(begin, sizeof(begin)) ==
         "\x7f"
         "ELF";
}

TEST(InstallTest, InstallsAllPartsAndNoHeaderThatNobodyNeeds) {
  const std::string prefix = Folder("all");
  const Outcome outcome = RunInstall("--prefix=" + prefix);
  ASSERT_EQ(outcome.code, 0) << outcome.output;
  for (const char* file :
       {"lib/libevenkeel_comm.a", "lib/libevenkeel_files.a", "lib/libevenkeel_join.a",
        "lib/libevenkeel_bucket.a", "lib/libevenkeel_zero_optim.a",
        "lib/cmake/evenkeel/evenkeelConfig.cmake", "lib/pkgconfig/evenkeel.pc",
        "include/evenkeel/comm/factory.h", "include/evenkeel/bucket/hooks/power_sgd.h",
        "share/evenkeel/LICENSE"}) {
    EXPECT_TRUE(fs::is_regular_file(fs::path(prefix) / file)) << file;
  }
  EXPECT_FALSE(fs::exists(prefix + "/include/evenkeel/comm/tcp/transport.h"));

  const Outcome again = RunInstall("--prefix " + prefix);
  EXPECT_EQ(again.code, 0) << again.output;
  EXPECT_THAT(again.output, HasSubstr(": 0 files written"));
}

// They load them where there are GPUs. The loader's folders would be those of this machine.
TEST(InstallTest, NothingNeedsALibraryOfCudaOrAFolderOfTheBuild) {
  const std::string prefix = Folder("needs");
  ASSERT_EQ(RunInstall("--prefix=" + prefix).code, 0);
  int programs = 0;
  for (const auto& file : fs::recursive_directory_iterator(prefix)) {
    const std::string path = file.path().string();
    if (!HasElfHeader(path)) continue;
    ++programs;
    const Outcome dynamic = RunCommand("readelf --wide --dynamic '" + path + "'");
    EXPECT_THAT(dynamic.output, HasSubstr("(NEEDED)")) << path;
    EXPECT_THAT(dynamic.output, Not(ContainsRegex("lib(cu|nccl|nv)[A-Za-z]*[.]so|RPATH|RUNPATH")))
        << path;
  }
  EXPECT_EQ(programs, 6);
  // Programs may name the folder where NVIDIA's packages put CUDA, but no other.
  const std::string toolkit = std::getenv("TOOLKIT_FOLDER");
  if (!toolkit.empty() && toolkit != "/usr/local/cuda") {
    EXPECT_EQ(RunCommand(absl::StrCat("grep -rlF '", toolkit, "/' '", prefix, "'")).output, "");
  }
  for (const char* file :
       {"lib/pkgconfig/evenkeel.pc", "lib/cmake/evenkeel/evenkeelConfig.cmake"}) {
    const std::string text = RunCommand(absl::StrCat("cat ", prefix, "/", file)).output;
    EXPECT_THAT(text, Not(ContainsRegex("-L/|libcu|cuda/"))) << file;
  }
}

TEST(InstallTest, ItsProgramsRunFromAnyFolder) {
  ASSERT_EQ(RunInstall("--prefix=" + Folder("built")).code, 0);
  fs::rename(Folder("built"), Folder("moved"));
  const std::string bin = Folder("moved/bin/evenkeel-");
  for (const char* program : {"flight", "generate", "launch", "samples", "top", "train"}) {
    const Outcome help = RunCommand(absl::StrCat(bin, program, " --help"));
    EXPECT_EQ(help.code, 0) << help.output;
    EXPECT_THAT(help.output, HasSubstr(absl::StrCat("  evenkeel-", program, " "))) << program;
    EXPECT_THAT(help.output, testing::AllOf(Not(HasSubstr("bazel")), Not(HasSubstr("$0"))));
    EXPECT_THAT(RunCommand(absl::StrCat(bin, program, " --no_such_flag")).output,
                testing::AnyOf(testing::StartsWith(absl::StrCat("evenkeel-", program, ": ")),
                               testing::StartsWith("ERROR: unknown command line flag")));
  }
  const Outcome launch =
      RunCommand(absl::StrCat(bin, "launch --nproc=2 -- ", bin,
                              "train --model=mlp --hidden=4 --epochs=1 --rank_steps=1,1"));
  EXPECT_EQ(launch.code, 0) << launch.output;
  EXPECT_THAT(launch.output, HasSubstr("on 2 ranks"));
}

TEST(InstallTest, ARelativePrefixMeansTheUsersFolder) {
  fs::create_directories(Folder("user"));
  const Outcome outcome =
      RunInstall("--prefix=sub/../here", "BUILD_WORKING_DIRECTORY=" + Folder("user"));
  EXPECT_EQ(outcome.code, 0) << outcome.output;
  EXPECT_TRUE(fs::exists(Folder("user/here/lib/libevenkeel_comm.a")));
}

TEST(InstallTest, DestdirComesBeforeThePrefix) {
  const Outcome outcome = RunInstall("--prefix=/usr", "DESTDIR=" + Folder("stage"));
  EXPECT_EQ(outcome.code, 0) << outcome.output;
  EXPECT_TRUE(fs::exists(Folder("stage/usr/lib/libevenkeel_comm.a")));
}

TEST(InstallTest, WhatWouldDoHarmIsRefusedWithOneSentence) {
  const std::string workspace = Folder("workspace");
  fs::create_directories(workspace);
  const struct {
    std::string arguments, environment, said;
  } cases[] = {
      {"", "", "--prefix=FOLDER is missing"},
      {"--prefix=", "", "--prefix=FOLDER is missing"},
      {"--prefix", "", "unknown argument --prefix"},
      {"--prefx=/x", "", "unknown argument --prefx=/x"},
      {"--prefix=/", "", "belongs to the system's package manager"},
      {"--prefix=/opt/../usr/", "", "belongs to the system's package manager"},
      {"--prefix=out", "DESTDIR=/tmp", "must be absolute"},
      {absl::StrCat("--prefix=", workspace, "/out"), "BUILD_WORKSPACE_DIRECTORY=" + workspace,
       "inside the source tree"},
      {"--prefix=out",
       absl::StrCat("BUILD_WORKSPACE_DIRECTORY=", workspace,
                    " BUILD_WORKING_DIRECTORY=", workspace),
       "inside the source tree"},
  };
  for (const auto& c : cases) {
    const Outcome outcome = RunInstall(c.arguments, c.environment);
    EXPECT_EQ(outcome.code, 1) << c.arguments;
    EXPECT_THAT(outcome.output, HasSubstr(c.said));
    EXPECT_EQ(outcome.output.find('\n'), outcome.output.size() - 1) << outcome.output;
  }
  EXPECT_TRUE(fs::is_empty(workspace));
}

TEST(InstallTest, AFolderBesideTheSourceTreeIsNotInside) {
  fs::create_directories(Folder("evenkeel"));
  const Outcome outcome = RunInstall("--prefix=" + Folder("evenkeel-installed"),
                                     "BUILD_WORKSPACE_DIRECTORY=" + Folder("evenkeel"));
  EXPECT_EQ(outcome.code, 0) << outcome.output;
}

TEST(InstallTest, HelpSaysWhatGoesWhere) {
  const Outcome outcome = RunInstall("--help");
  EXPECT_EQ(outcome.code, 0);
  EXPECT_THAT(outcome.output, HasSubstr("--prefix=FOLDER"));
}

}  // namespace
