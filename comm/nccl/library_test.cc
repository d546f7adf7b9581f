// Loads libraries into this process. Nothing unloads NCCL, so the test that loads it is the last
// one.

#include "evenkeel/comm/nccl/library.h"

#include <dlfcn.h>

#include <cstdlib>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/nccl/functions.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

using testing::HasSubstr;

constexpr char kOld[] = "comm/nccl/libold_nccl.so";
constexpr char kNowhere[] = "/nowhere/libnccl.so.2";

// Checks the code of the status.
std::string TextOf(const absl::Status& status) {
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition) << status;
  return std::string(status.message());
}

TEST(LoadNcclTest, ProgramsAreNotLinkedWithNccl) {
  EXPECT_EQ(dlopen("libnccl.so.2", RTLD_NOW | RTLD_NOLOAD), nullptr);
  EXPECT_EQ(dlsym(RTLD_DEFAULT, "ncclGetVersion"), nullptr);
}

TEST(LoadNcclTest, ReportsAMissingLibrary) {
  EXPECT_EQ(TextOf(LoadNccl(kNowhere).status()),
            "cannot load NCCL: /nowhere/libnccl.so.2: cannot open shared object file: No such file "
            "or directory; install NCCL, or set EVENKEEL_NCCL to the path of its libnccl.so.2");
}

TEST(LoadNcclTest, ReportsALibraryThatIsNotNccl) {
  EXPECT_THAT(TextOf(LoadNccl("libz.so.1").status()),
              HasSubstr("libz.so.1 has no ncclGetVersion: set EVENKEEL_NCCL to the path of"));
}

TEST(LoadNcclTest, ReportsAnNcclThatIsTooOld) {
  EXPECT_THAT(TextOf(LoadNccl(kOld).status()),
              HasSubstr("libold_nccl.so has NCCL 2.4.8, which is too old: 2.18.0 or newer"));
}

TEST(LoadNcclTest, TheLibraryThatIsLoadedIsUsedAndMustHaveTheFunctions) {
  void* const loaded = dlopen(kOld, RTLD_NOW | RTLD_LOCAL);
  ASSERT_NE(loaded, nullptr) << dlerror();
  EXPECT_THAT(TextOf(LoadNccl(kNowhere).status()), HasSubstr("libold_nccl.so has NCCL 2.4.8"));
  *static_cast<int*>(dlsym(loaded, "old_nccl_version")) = 22809;
  EXPECT_THAT(
      TextOf(LoadNccl("").status()),
      HasSubstr("libold_nccl.so has NCCL 2.28.9, but lacks ncclAllGather, ncclAllReduce, nccl"));
  dlclose(loaded);
  EXPECT_THAT(TextOf(LoadNccl(kNowhere).status()), HasSubstr("cannot load NCCL"));
}

TEST(LoadNcclTest, TakesThePathFromTheEnvironmentAndThenTheSystemsLibrary) {
  setenv("EVENKEEL_NCCL", kNowhere, /*replace=*/1);
  EXPECT_THAT(TextOf(NcclLibrary().status()), HasSubstr("cannot load NCCL: /nowhere/libnccl.so.2"));
  setenv("EVENKEEL_NCCL", kOld, /*replace=*/1);
  EXPECT_THAT(TextOf(NcclLibrary().status()), HasSubstr("libold_nccl.so has NCCL 2.4.8"));
  unsetenv("EVENKEEL_NCCL");
  if (absl::string_view(EVENKEEL_NCCL_FOLDER).empty())
    GTEST_SKIP() << "libnccl.so.2 is nowhere or where programs do not search it";

  const absl::StatusOr<NcclApi*> library = NcclLibrary();
  ASSERT_TRUE(library.ok()) << library.status();
  EXPECT_GE((*library)->version(), 21800);
  const absl::StatusOr<NcclFunctions> nccl = LoadNccl(kNowhere);  // It is loaded now.
  ASSERT_TRUE(nccl.ok()) << nccl.status();
  int version = 0;
  EXPECT_EQ(nccl->ncclGetVersion(&version), ncclSuccess);
  EXPECT_EQ(version, (*library)->version());
  EXPECT_STREQ(nccl->ncclGetErrorString(ncclSuccess), "no error");
  EXPECT_EQ(nccl->ncclMemAlloc != nullptr, version >= 21903);
  EXPECT_EQ(nccl->ncclAlltoAll != nullptr, version >= 22803);
}

}  // namespace
}  // namespace evenkeel::internal
