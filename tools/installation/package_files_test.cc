// That CMake and pkg-config take these files is for tests/consumer_cmake to say.

#include "evenkeel/tools/installation/package_files.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::HasSubstr;
using testing::Not;

Package Small() {
  return {.version = "0.3.0+abc",
          .abseil_version = "20220623",
          .parts = {"bucket", "join", "comm"},
          .abseil = {"status", "strings"},
          .link_flags = {"-l:libssl.so", "-Wl,--no-undefined", "-lrt"}};
}

TEST(PackageFilesTest, NoMarkIsLeftInAFile) {
  for (const std::string& text :
       {CMakeConfig(Small()), CMakeVersion(Small()), PkgConfig(Small())}) {
    EXPECT_THAT(text, Not(HasSubstr("@")));
  }
}

TEST(PackageFilesTest, ATargetNeedsThePartsAfterItAndTheLastOneWhatIsNotOurs) {
  EXPECT_THAT(CMakeConfig(Small()), HasSubstr(R"(
_evenkeel_add(comm
  ${_evenkeel_abseil}
  Threads::Threads
  -Wl,--push-state,--as-needed,-l:libssl.so,--no-undefined,-lrt,--pop-state)
_evenkeel_add(join
  evenkeel::comm)
_evenkeel_add(bucket
  evenkeel::join
  evenkeel::comm)
)"));
}

TEST(PackageFilesTest, LibrariesAreInTheOrderOfLinking) {
  EXPECT_THAT(PkgConfig(Small()),
              HasSubstr("Libs: -L${libdir} -levenkeel_bucket -levenkeel_join -levenkeel_comm "
                        "-Wl,--push-state,--as-needed,-l:libssl.so,--no-undefined,-lrt,--pop-state "
                        "-pthread\n"));
}

TEST(PackageFilesTest, AbseilIsThatOfTheBuild) {
  EXPECT_THAT(CMakeConfig(Small()), HasSubstr("find_dependency(absl 20220623 EXACT CONFIG)\n"
                                              "  set(_evenkeel_abseil status strings)\n"));
  EXPECT_THAT(PkgConfig(Small()),
              HasSubstr("Requires: absl_status = 20220623, absl_strings = 20220623\n"));
}

TEST(PackageFilesTest, AVersionIsANumberAndTheBuildIsNamedBesideIt) {
  EXPECT_THAT(CMakeVersion(Small()), HasSubstr("set(PACKAGE_VERSION \"0.3.0\")"));
  EXPECT_THAT(CMakeVersion(Small()), HasSubstr("STREQUAL \"0.3\""));
  EXPECT_THAT(PkgConfig(Small()), HasSubstr("\nVersion: 0.3.0\n"));
  EXPECT_THAT(CMakeConfig(Small()), HasSubstr("evenkeel 0.3.0+abc"));
}

TEST(PackageFilesTest, SaysWhetherNcclIsInTheBuild) {
  Package package = Small();
  EXPECT_THAT(CMakeConfig(package), HasSubstr("set(evenkeel_HAS_NCCL FALSE)"));
  package.has_nccl = true;
  EXPECT_THAT(CMakeConfig(package), HasSubstr("set(evenkeel_HAS_NCCL TRUE)"));
}

}  // namespace
}  // namespace evenkeel
