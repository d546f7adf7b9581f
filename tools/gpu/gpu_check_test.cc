// Runs gpu_check.sh over a folder of programs that only say what tests say.

#include <sys/stat.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "evenkeel/tools/gpu/testing/run_command.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace evenkeel {
namespace {

using Json = nlohmann::json;
using testing::AllOf;
using testing::HasSubstr;
using testing::Not;
namespace fs = std::filesystem;

constexpr absl::string_view kPasses = "echo '[  PASSED  ] 3 tests.'";
constexpr absl::string_view kSkipsOne =
    "echo '[  PASSED  ] 2 tests.'; echo '[  SKIPPED ] 1 test, listed below:'";
constexpr absl::string_view kSkipsAll =
    "echo 'a_test.cc:8: Skipped'; echo 'needs 2 CUDA devices, there is 1'; echo; echo '[  PASSED  "
    "] 0 tests.'; "
    "echo '[  SKIPPED ] 4 tests, listed below:'";
constexpr absl::string_view kFails =
    "echo '[  FAILED  ] ATest.Adds, where GetParam() = 3 (1 ms)'; echo '[  PASSED  ] 1 test.'; "
    "echo '[  FAILED  ] 1 test, listed below:'; echo '[  FAILED  ] ATest.Adds, where GetParam() = "
    "3'; exit 1";
// A sanitizer that runs what it is given.
constexpr absl::string_view kClean =
    "while [ \"${1#./}\" = \"$1\" ]; do shift; done; \"$@\"; code=$?; echo '========= ERROR "
    "SUMMARY: 0 errors'; exit "
    "$code";

class GpuCheckTest : public testing::Test {
 protected:
  void SetUp() override {
    fs::remove_all(folder_);
    fs::create_directories(folder_);
    fs::copy_file("tools/gpu_check.sh", absl::StrCat(folder_, "/gpu_check.sh"));
    std::ofstream(absl::StrCat(folder_, "/tests.txt"));
    Tool("nvidia-smi", "echo '0, Some GPU, 1000 MiB, 580.1, 9.0'");
    Bench("echo '0, Some GPU'");
    Tool("python3", "echo 'python3 has no PyTorch: none'; exit 1");
    Tool("compute-sanitizer", kClean);
  }

  static void Script(const std::string& path, absl::string_view text) {
    fs::create_directories(fs::path(path).parent_path());
    std::ofstream(path) << "#!/bin/bash\n" << text << "\n";
    ASSERT_EQ(chmod(path.c_str(), 0755), 0);
  }
  // Found before the machine's own.
  void Tool(absl::string_view name, absl::string_view text) {
    Script(absl::StrCat(tools_, "/", name), text);
  }
  void Test(absl::string_view package, absl::string_view name, absl::string_view text,
            absl::string_view kind = "-") {
    std::ofstream(absl::StrCat(folder_, "/tests.txt"), std::ios::app)
        << "//" << package << ":" << name << "\t" << package << "/" << name << "\t" << kind << "\n";
    Script(absl::StrCat(folder_, "/runfiles/evenkeel/", package, "/", name), text);
  }
  void Bench(absl::string_view devices, absl::string_view rows = "true") {
    Script(absl::StrCat(folder_, "/runfiles/evenkeel/tools/gpu/bench_device"),
           absl::StrCat("if [ \"$1\" = --devices ]; then ", devices, "; else ", rows, "; fi"));
  }

  CommandResult Run(absl::string_view args = "") {
    const std::string json = absl::StrCat(testing::TempDir(), "/check.json");
    fs::remove(json);
    const CommandResult result =
        RunCommand(absl::StrCat("PATH='", tools_, "':$PATH '", folder_, "/gpu_check.sh' --json='",
                                json, "' --logs='", testing::TempDir(), "/logs' ", args));
    json_ = Json::parse(ReadWholeFile(json), nullptr, /*allow_exceptions=*/false);
    return result;
  }
  // {result, figure} of a row; null if there is none.
  Json RowOf(absl::string_view name) const {
    for (const Json& row : json_["rows"]) {
      if (row["name"].get<std::string>() == name) return row;
    }
    return nullptr;
  }
  std::string ResultOf(absl::string_view name) const {
    const Json row = RowOf(name);
    return row.is_null() ? "missing" : row["result"].get<std::string>();
  }
  std::string FigureOf(absl::string_view name) const {
    const Json row = RowOf(name);
    return row.is_null() ? "missing" : row["figure"].get<std::string>();
  }

  const std::string folder_ = absl::StrCat(testing::TempDir(), "/bundle");
  const std::string tools_ = absl::StrCat(testing::TempDir(), "/bin");
  Json json_;
};

TEST_F(GpuCheckTest, WithoutAGpuItSaysSoAndFails) {
  Test("a", "a_test", kPasses);
  Tool("nvidia-smi", "echo 'NVIDIA-SMI has failed'; exit 9");
  Bench("echo 'bench_device: no CUDA device: no driver' >&2; exit 1");
  CommandResult result = Run();
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.out,
              AllOf(HasSubstr("no GPU: bench_device: no CUDA device: no driver; nvidia-smi says: "
                              "NVIDIA-SMI has failed"),
                    HasSubstr("0 passed, 1 failed, 0 skipped"), Not(HasSubstr("a_test"))));
  EXPECT_EQ(json_["failed"], 1);

  Bench("echo '0, Some GPU'");  // Whatever nvidia-smi says.
  result = Run();
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_EQ(json_["devices"], Json::array({"0, Some GPU"}));
}

TEST_F(GpuCheckTest, TellsOfEachTestWhatBecameOfIt) {
  Test("a", "passes_test", kPasses);
  Test("a", "skips_one_test", kSkipsOne);
  Test("a", "skips_all_test", kSkipsAll);
  Test("a", "fails_test", kFails);
  Test("a", "crashes_test", "echo '\"out\\of\" memory'; kill -SEGV $$");
  Test("a", "silent_test", "true");
  const CommandResult result = Run();
  EXPECT_EQ(result.exit_code, 1);
  ASSERT_FALSE(json_.is_discarded());
  EXPECT_EQ(FigureOf("//a:passes_test"), "3 passed");
  EXPECT_EQ(FigureOf("//a:skips_one_test"), "2 passed, 1 skipped");
  EXPECT_EQ(ResultOf("//a:skips_all_test"), "skipped");
  EXPECT_EQ(FigureOf("//a:skips_all_test"), "needs 2 CUDA devices, there is 1");
  EXPECT_EQ(ResultOf("//a:fails_test"), "failed");
  EXPECT_THAT(FigureOf("//a:fails_test"), HasSubstr("1 failed: ATest.Adds, see "));
  EXPECT_THAT(FigureOf("//a:crashes_test"), HasSubstr("exit code 139: "));
  EXPECT_EQ(ResultOf("//a:silent_test"), "failed") << "whoever says nothing has shown nothing";
  EXPECT_EQ(json_["devices"], Json::array({"0, Some GPU, 1000 MiB, 580.1, 9.0"}));
  EXPECT_THAT(result.out, HasSubstr("2 passed, 3 failed, 2 skipped"));  // One of them PyTorch.
}

TEST_F(GpuCheckTest, PassesIfSomethingPassedAndNothingFailed) {
  Test("a", "skips_all_test", kSkipsAll);
  EXPECT_EQ(Run().exit_code, 1) << "nothing ran";
  Test("a", "passes_test", kPasses);
  EXPECT_EQ(Run().exit_code, 0);
  EXPECT_EQ(Run("--only=skips").exit_code, 1);
}

TEST_F(GpuCheckTest, EndsWhatTakesTooLong) {
  Test("a", "hangs_test", "sleep 60");
  EXPECT_EQ(Run("--timeout=1").exit_code, 1);
  EXPECT_THAT(FigureOf("//a:hangs_test"), HasSubstr("ended after 1 s"));
}

TEST_F(GpuCheckTest, SkipsWhatDoesNotFitIntoTheSeconds) {
  Test("a/device", "hangs_test", "sleep 600", "kernels");
  Test("a", "late_test", kPasses);
  EXPECT_EQ(Run("--seconds=8").exit_code, 1);
  EXPECT_THAT(FigureOf("//a/device:hangs_test"), HasSubstr("ended after "));
  EXPECT_EQ(ResultOf("//a:late_test"), "skipped");
  EXPECT_EQ(FigureOf("//a:late_test"), "none of the 8 seconds are left");
  EXPECT_EQ(FigureOf("benchmarks"), "none of the 8 seconds are left");
  EXPECT_EQ(FigureOf("synccheck //a/device:hangs_test"), "none of the 8 seconds are left");
}

TEST_F(GpuCheckTest, WhatTellsMostComesFirstAndIsThereAtOnce) {
  Test("a", "waits_test",
       absl::StrCat("grep -q '\"pack\".*passed' '", testing::TempDir(), "/check.json' && ",
                    kPasses));
  Test("b/device", "kernel_test", kPasses, "kernels");
  std::ofstream(absl::StrCat(folder_, "/tests.txt"), std::ios::app)
      << "//tests/conformance:ops_test\ta/ops_test\t-\n";
  Script(absl::StrCat(folder_, "/runfiles/evenkeel/a/ops_test"), kPasses);
  Test("z", "late_test", kPasses);
  Bench("echo 0", R"(printf 'pack\tpassed\t0.91\t>= 0.85\n')");
  EXPECT_EQ(Run("--only='//|benchmarks'").exit_code, 0);
  std::vector<std::string> names;
  for (const Json& row : json_["rows"]) names.push_back(row["name"]);
  EXPECT_THAT(names, testing::ElementsAre(
                         "//b/device:kernel_test", "AdamW beside PyTorch's fused one", "pack",
                         "//a:waits_test", "//z:late_test", "//tests/conformance:ops_test",
                         "memcheck //b/device:kernel_test", "racecheck //b/device:kernel_test",
                         "synccheck //b/device:kernel_test"));
}

TEST_F(GpuCheckTest, WhoIsToldToEndStillTellsWhatItKnows) {
  const std::string began = absl::StrCat(testing::TempDir(), "/began");
  fs::remove(began);
  Test("a", "passes_test", kPasses);
  Test("b", "hangs_test", absl::StrCat("touch '", began, "'; exec sleep 600"));
  Test("c", "late_test", kPasses);
  const CommandResult result = Run(absl::StrCat(
      "& check=$!; until [ -e '", began, "' ]; do sleep 0.05; done; kill $check; wait $check"));
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_THAT(result.out,
              AllOf(HasSubstr("//a:passes_test "), HasSubstr("1 passed, 1 failed, 1 skipped")));
  EXPECT_EQ(ResultOf("//a:passes_test"), "passed");
  EXPECT_THAT(FigureOf("gpu_check"), HasSubstr("was ended by a signal after "));
  EXPECT_EQ(ResultOf("//c:late_test"), "missing");
}

TEST_F(GpuCheckTest, FindsLibrariesThatAreNotInTheFolder) {
  std::ofstream(absl::StrCat(folder_, "/libraries.txt"))
      << "libhere.so.1\nlibtoolkit.so.13\nlibnowhere.so.9\n";
  for (const absl::string_view file :
       {"/bundle/lib/libhere.so.1", "/cuda/lib64/libtoolkit.so.13"}) {
    const std::string path = absl::StrCat(testing::TempDir(), file);
    fs::create_directories(fs::path(path).parent_path());
    std::ofstream(path) << "a library";
  }
  Test("a", "looks_test",
       absl::StrCat("for name in libhere.so.1 libtoolkit.so.13; do (IFS=:; for folder in "
                    "$LD_LIBRARY_PATH; do "
                    "[ -e $folder/$name ] && exit; done; exit 1) || exit; done; ",
                    kPasses));
  setenv("CUDA_HOME", absl::StrCat(testing::TempDir(), "/cuda").c_str(), 1);
  EXPECT_EQ(Run().exit_code, 0);
  unsetenv("CUDA_HOME");
  EXPECT_EQ(ResultOf("//a:looks_test"), "passed");
  EXPECT_EQ(ResultOf("libnowhere.so.9"), "skipped");
  EXPECT_EQ(ResultOf("libtoolkit.so.13"), "missing");
}

TEST_F(GpuCheckTest, RunsKernelsUnderTheSanitizer) {
  Test("a", "passes_test", kPasses);
  Test("a/device", "kernel_test", kPasses, "kernels");
  Test("a/device", "skipping_test", kSkipsAll, "kernels");
  EXPECT_EQ(Run().exit_code, 0);
  EXPECT_EQ(ResultOf("memcheck //a/device:kernel_test"), "passed");
  EXPECT_EQ(ResultOf("racecheck //a/device:kernel_test"), "passed");
  EXPECT_EQ(ResultOf("synccheck //a/device:skipping_test"), "skipped");
  EXPECT_EQ(ResultOf("memcheck //a:passes_test"), "missing");

  const auto sanitizer = [this](absl::string_view of_tests) {
    Tool("compute-sanitizer",
         absl::StrCat("case \"$*\" in *bench_device*) echo '========= ERROR SUMMARY: 0 errors' ;; "
                      "*) echo \"$*\"; ",
                      of_tests, ";; esac"));
  };
  sanitizer("echo '[  PASSED  ] 3 tests.'; echo '========= ERROR SUMMARY: 2 errors'; exit 99");
  EXPECT_EQ(Run().exit_code, 1);
  EXPECT_THAT(FigureOf("memcheck //a/device:kernel_test"),
              HasSubstr("ERROR SUMMARY: 2 errors, see "));

  sanitizer("echo '[  PASSED  ] 3 tests.'");
  EXPECT_EQ(Run().exit_code, 1);
  EXPECT_THAT(FigureOf("memcheck //a/device:kernel_test"), HasSubstr("printed no summary"));
  EXPECT_EQ(Run("--quick").exit_code, 0);

  // Errors that calls answer are the tests' own affair; what takes long is for our own kernels.
  sanitizer("echo \"exit code 3: $*\"; exit 3");
  Run();
  EXPECT_THAT(FigureOf("memcheck //a/device:kernel_test"),
              HasSubstr("--report-api-errors no ./a/device/kernel_test"));
  EXPECT_THAT(FigureOf("racecheck //a/device:kernel_test"),
              HasSubstr("--kernel-regex kns=ek_ ./a/device/kernel_test"));
  Tool("compute-sanitizer",
       absl::StrCat("case \"$*\" in *--kernel-regex*) exit 1 ;; esac; ", kClean));
  EXPECT_EQ(Run().exit_code, 0) << "an older one knows no filter";

  Tool("compute-sanitizer",
       "echo '========='; echo '========= Error: Device not supported'; exit 1");
  EXPECT_EQ(Run().exit_code, 0);
  EXPECT_EQ(ResultOf("racecheck //a/device:kernel_test"), "skipped");
  EXPECT_THAT(FigureOf("memcheck //a/device:kernel_test"),
              HasSubstr("does not work here: ========= Error: Device not"));
}

TEST_F(GpuCheckTest, TakesTheFiguresOfTheBenchmarks) {
  Bench(
      "echo 0",
      R"(printf 'pack\tpassed\t0.91\t>= 0.85\nsmall\tshown\t0.4\t\nunpack\tfailed\t0.80\t>= 0.85\n'; exit 1)");
  const CommandResult result = Run();
  EXPECT_EQ(result.exit_code, 1);
  EXPECT_EQ(RowOf("pack")["bar"], ">= 0.85");
  EXPECT_EQ(ResultOf("small"), "shown");
  EXPECT_THAT(result.out, HasSubstr("1 passed, 1 failed, 1 skipped"));
  EXPECT_EQ(FigureOf("AdamW beside PyTorch's fused one"), "python3 has no PyTorch: none");

  Tool("python3", "echo warning; echo 0.0021");
  Bench("echo 0", R"(echo "$*" >&2; printf 'pack\tpassed\t%s\t\n' "$*")");
  EXPECT_EQ(Run().exit_code, 0);
  EXPECT_EQ(FigureOf("pack"), "--rows --pytorch_adamw_seconds=0.0021");

  Bench("echo 0", "echo 'no memory' >&2; exit 1");
  Run();
  EXPECT_EQ(FigureOf("benchmarks"), "exit code 1: no memory");
}

TEST_F(GpuCheckTest, RefusesWhatItCannotUse) {
  EXPECT_EQ(Run("--fast").exit_code, 2);
  EXPECT_THAT(Run("--fast").error, HasSubstr("unknown argument '--fast'"));
  EXPECT_EQ(Run("--timeout=soon").exit_code, 2);
  EXPECT_THAT(Run("--help").out, HasSubstr("Exits with 0 only if"));
  fs::remove(absl::StrCat(folder_, "/tests.txt"));
  EXPECT_THAT(Run().error, HasSubstr("has no tests.txt: tools/gpu/pack.sh makes"));
}

}  // namespace
}  // namespace evenkeel
