// In every test: Abseil ends a test whose mutexes were taken in a cycle, if it can find such
// cycles; see comm/base/clock.cc.

#include "absl/base/config.h"
#include "absl/synchronization/mutex.h"
#include "gtest/gtest.h"

namespace {

#if ABSL_LTS_RELEASE_VERSION < 20230802
class SearchForLockCycles : public testing::Environment {
  void SetUp() override { absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kAbort); }
};

[[maybe_unused]] testing::Environment* const search =
    testing::AddGlobalTestEnvironment(new SearchForLockCycles);
#endif

}  // namespace
