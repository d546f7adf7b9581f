#include "evenkeel/comm/base/worker_thread.h"

#include <vector>

#include "absl/synchronization/notification.h"
#include "evenkeel/comm/base/librarys_thread.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

using testing::ElementsAre;

TEST(WorkerThreadTest, RunsWhatWasPostedInOrderBeforeItGoes) {
  std::vector<int> seen;
  absl::Notification gate;
  {
    WorkerThread worker;
    EXPECT_TRUE(worker.Post([&] { gate.WaitForNotification(); }).ok());
    const absl::Status posted = worker.Post([&] {
      seen.push_back(1);
      EXPECT_TRUE(worker.Post([&] { seen.push_back(3); }).ok());
    });
    EXPECT_TRUE(posted.ok()) << posted;
    EXPECT_TRUE(worker.Post([&] { seen.push_back(2); }).ok());
    gate.Notify();
  }
  EXPECT_THAT(seen, ElementsAre(1, 2, 3));
}

TEST(WorkerThreadTest, IsAThreadOfTheLibrary) {
  bool is_the_librarys = false;
  {
    WorkerThread worker;
    EXPECT_TRUE(worker.Post([&] { is_the_librarys = IsTheLibrarysThread(); }).ok());
  }
  EXPECT_TRUE(is_the_librarys);
  EXPECT_FALSE(IsTheLibrarysThread());
}

TEST(WorkerThreadTest, MayHaveNothingToDo) { WorkerThread idle; }

}  // namespace
}  // namespace evenkeel::internal
