#include "evenkeel/comm/device/shared_library.h"

#include <cmath>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/comm/status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

// A header does this where a function has a newer version.
double old_log2(double);
#define old_log2 log2

namespace evenkeel::internal {
namespace {

using ::testing::HasSubstr;

constexpr char kNowhere[] = "/nowhere/libm.so.6";

// The C library's, which every machine has.
#define EK_SOME_FUNCTIONS(X) X(old_log2)
struct SomeFunctions {
  EK_SOME_FUNCTIONS(EK_DECLARE_FUNCTION)
};

absl::StatusOr<SharedLibrary> LoadMath() {
  return SharedLibrary::Load("mathematics", {kNowhere, "libm.so.6"});
}

TEST(SharedLibraryTest, LoadsTheFirstFileThatIsThereAndFindsTheNewestVersionOfAFunction) {
  absl::StatusOr<SharedLibrary> library = LoadMath();
  ASSERT_TRUE(library.ok()) << library.status();
  SomeFunctions functions;
  EK_FIND_FUNCTIONS(EK_SOME_FUNCTIONS, *library, functions);
  EXPECT_TRUE(library->Keep("it").ok());
  EXPECT_EQ(functions.old_log2(8), 3);
}

TEST(SharedLibraryTest, NamesTheFunctionsThatItLacks) {
  absl::StatusOr<SharedLibrary> library = LoadMath();
  ASSERT_TRUE(library.ok()) << library.status();
  void (*optional)() = nullptr, (*first)() = nullptr, (*second)() = nullptr;
  EXPECT_FALSE(library->FindOptional("ek_optional", optional));
  library->Find("ek_first", first);
  library->Find("ek_second", second);
  const absl::Status kept = library->Keep(library->Name());
  EXPECT_EQ(kept.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(kept.message()), HasSubstr("/libm.so.6 lacks ek_first, ek_second"));
}

TEST(SharedLibraryTest, ReportsEachReasonOnce) {
  const absl::Status status =
      SharedLibrary::Load("mathematics", {kNowhere, "libno.so", "/etc/passwd"}).status();
  EXPECT_EQ(std::string(status.message()),
            "cannot load mathematics: /nowhere/libm.so.6: cannot open shared object file: No such "
            "file or directory; /etc/passwd: invalid ELF header");
}

TEST(SharedLibraryTest, SaysWhyItCannotBeLoadedAndWhatToDo) {
  EXPECT_EQ(SharedLibrary::Load("mathematics", {kNowhere, "libno.so"}, "install it").status(),
            absl::FailedPreconditionError(
                "cannot load mathematics: /nowhere/libm.so.6: cannot open shared object file: No "
                "such file or directory; install it"));
}

}  // namespace
}  // namespace evenkeel::internal
