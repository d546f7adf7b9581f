#include "evenkeel/trainer/checkpoint/checkpoint_folder.h"

#include <errno.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

std::vector<std::string> flushed;  // Folders and files, in their order.
std::string unflushable;           // Flushing this folder fails.

}  // namespace
}  // namespace evenkeel

// Replaces the C library's.
extern "C" int fsync(int file) {
  const std::string path =
      std::filesystem::read_symlink(absl::StrCat("/proc/self/fd/", file)).string();
  evenkeel::flushed.push_back(path);
  if (path != evenkeel::unflushable) return static_cast<int>(syscall(SYS_fsync, file));
  errno = EIO;
  return -1;
}

namespace evenkeel {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::UnorderedElementsAre;

std::string Folder(absl::string_view name) {
  const std::string folder = absl::StrCat(std::getenv("TEST_TMPDIR"), "/", name);
  std::filesystem::remove_all(folder);
  return folder;
}

std::vector<int64_t> StepsIn(const std::string& folder) {
  std::vector<int64_t> steps;
  const auto found = FindCheckpoints(folder);
  EXPECT_TRUE(found.ok()) << found.status();
  for (const FoundCheckpoint& checkpoint : *found) steps.push_back(checkpoint.step);
  return steps;
}

std::vector<std::string> NamesIn(const std::string& folder) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    names.push_back(entry.path().filename());
  return names;
}

void Write(const std::string& path) { std::ofstream(path) << "something"; }

void Save(CheckpointFolder& folder, int64_t step, int keep) {
  const auto path = folder.Begin(step);
  ASSERT_TRUE(path.ok()) << path.status();
  Write(*path + "/file");
  const auto published = folder.Publish(keep);
  ASSERT_TRUE(published.ok()) << published.status();
  EXPECT_TRUE(std::filesystem::exists(*published + "/file"));
}

TEST(CheckpointFolderTest, KeepsTheNewest) {
  const std::string path = Folder("keep/below");
  EXPECT_THAT(StepsIn(path), IsEmpty());
  auto folder = CheckpointFolder::Open(path);
  ASSERT_TRUE(folder.ok()) << folder.status();
  for (const int64_t step : {5, 10, 1500, 1000000000}) Save(**folder, step, 0);
  EXPECT_THAT(StepsIn(path), ElementsAre(5, 10, 1500, 1000000000));
  Save(**folder, 1000000001, 3);
  EXPECT_THAT(StepsIn(path), ElementsAre(1500, 1000000000, 1000000001));
  Save(**folder, 1000000002, 1);
  EXPECT_THAT(NamesIn(path), UnorderedElementsAre("step-1000000002", ".lock"));
}

TEST(CheckpointFolderTest, IsPublishedEvenIfAnOlderOneCannotBeRemoved) {
  const std::string path = Folder("stuck");
  auto folder = CheckpointFolder::Open(path);
  ASSERT_TRUE(folder.ok()) << folder.status();
  Save(**folder, 5, 0);
  const std::string obstacle = path + "/.removing-step-000000005";
  std::filesystem::create_directory(obstacle);
  Write(obstacle + "/file");
  Save(**folder, 6, 1);
  EXPECT_THAT(StepsIn(path), ElementsAre(5, 6));
  std::filesystem::remove_all(obstacle);
  Save(**folder, 7, 1);
  EXPECT_THAT(StepsIn(path), ElementsAre(7));
}

// If the host crashes now, the new one may be gone.
TEST(CheckpointFolderTest, OlderOnesStayWhileTheNewOneMayNotBeOnTheDisk) {
  const std::string path = Folder("unflushed");
  auto folder = CheckpointFolder::Open(path);
  ASSERT_TRUE(folder.ok()) << folder.status();
  Save(**folder, 5, 1);
  unflushable = std::filesystem::canonical(path);
  Save(**folder, 6, 1);
  unflushable.clear();
  EXPECT_THAT(StepsIn(path), ElementsAre(5, 6));
  Save(**folder, 7, 1);
  EXPECT_THAT(StepsIn(path), ElementsAre(7));
}

TEST(CheckpointFolderTest, ItsFolderAndThoseAboveAreOnTheDiskOnceItIsOpen) {
  const std::string above = Folder("new");
  flushed.clear();
  ASSERT_TRUE(CheckpointFolder::Open(above + "/one/two/").ok());
  const std::string parent = std::filesystem::canonical(above + "/..");
  EXPECT_THAT(flushed, testing::IsSupersetOf({parent, parent + "/new", parent + "/new/one"}));
}

TEST(CheckpointFolderTest, OneThatIsSetAsideIsKeptAndNotFound) {
  const std::string path = Folder("aside");
  auto folder = CheckpointFolder::Open(path);
  ASSERT_TRUE(folder.ok()) << folder.status();
  for (const char* const mark : {"/first", "/second"}) {  // The second replaces the first.
    Save(**folder, 5, 0);
    Write(CheckpointPath(path, 5) + mark);
    const auto aside = (*folder)->SetAside(5);
    ASSERT_TRUE(aside.ok()) << aside.status();
    EXPECT_EQ(*aside, path + "/damaged-step-000000005");
    EXPECT_THAT(StepsIn(path), IsEmpty());
    EXPECT_TRUE(std::filesystem::exists(*aside + mark));
    EXPECT_THAT(NamesIn(*aside), UnorderedElementsAre("file", mark + 1));
  }
  EXPECT_TRUE(absl::IsNotFound((*folder)->SetAside(6).status()));
}

TEST(CheckpointFolderTest, WhatIsUnfinishedIsNoCheckpointAndGoes) {
  const std::string path = Folder("leftovers");
  {
    auto folder = CheckpointFolder::Open(path);
    ASSERT_TRUE(folder.ok()) << folder.status();
    Save(**folder, 7, 3);
    const auto begun = (*folder)->Begin(8);
    ASSERT_TRUE(begun.ok());
    Write(*begun + "/file");
    EXPECT_THAT(StepsIn(path), ElementsAre(7));
  }
  std::filesystem::create_directories(path + "/.removing-step-000000003/optimizer");
  std::filesystem::create_directory(absl::StrCat(path, "/.removing-", std::string(240, 'x')));
  Write(path + "/.lock.12-3a");
  std::filesystem::create_directory(path + "/step-");
  std::filesystem::create_directory(path + "/step-12x");
  std::filesystem::create_directory(path + "/step-99999999999999999999");
  std::filesystem::create_directory(path + "/step--00000005");
  EXPECT_THAT(StepsIn(path), ElementsAre(7));
  auto folder = CheckpointFolder::Open(path);
  ASSERT_TRUE(folder.ok()) << folder.status();
  EXPECT_THAT(NamesIn(path), UnorderedElementsAre("step-000000007", ".lock", "step-", "step-12x",
                                                  "step-99999999999999999999", "step--00000005"));
  // A save that was given up, and the same step again.
  ASSERT_TRUE((*folder)->Begin(9).ok());
  (*folder)->Discard();
  Save(**folder, 9, 3);
  EXPECT_THAT(StepsIn(path), ElementsAre(7, 9));
}

// Another rank learns later that the save has failed.
TEST(CheckpointFolderTest, ASaveIsDiscardedWhileAnotherRankStillWrites) {
  const std::string path = Folder("discarded");
  auto folder = CheckpointFolder::Open(path);
  ASSERT_TRUE(folder.ok()) << folder.status();
  for (int round = 0; round < 20; ++round) {
    const auto begun = (*folder)->Begin(round);
    ASSERT_TRUE(begun.ok()) << begun.status();
    std::atomic<int> files = 0;
    std::thread other([&] {
      while (files < 5000 && std::ofstream(absl::StrCat(*begun, "/", files.load())).good()) ++files;
    });
    for (int look = 0; look < 1000 && files < 100; ++look) absl::SleepFor(absl::Milliseconds(1));
    (*folder)->Discard();
    other.join();
    ASSERT_THAT(NamesIn(path), ElementsAre(".lock"));
  }
}

TEST(CheckpointFolderTest, IsOneJobsAtATimeHoweverThatEnds) {
  const std::string path = Folder("lock");
  int ready[2];
  ASSERT_EQ(pipe(ready), 0);
  const pid_t pid = fork();
  if (pid == 0) {
    const auto folder = CheckpointFolder::Open(path);
    const char ok = folder.ok() ? 'y' : 'n';
    (void)!write(ready[1], &ok, 1);
    pause();
    _exit(0);
  }
  char ok = 0;
  ASSERT_EQ(read(ready[0], &ok, 1), 1);
  ASSERT_EQ(ok, 'y');
  const absl::Status refused =
      CheckpointFolder::Open(path, {.patience = absl::Milliseconds(50)}).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("another job is writing its checkpoints to"));
  kill(pid, SIGKILL);  // And at once: the kernel may still be at it.
  const auto folder = CheckpointFolder::Open(path);
  EXPECT_TRUE(folder.ok()) << folder.status();
  waitpid(pid, nullptr, 0);
}

// A process that was stopped in the middle of a save holds the lock, and goes on at any later time.
TEST(CheckpointFolderTest, ASuccessorTakesOverFromAProcessThatIsStillThere) {
  const std::string path = Folder("succeeded");
  auto first = CheckpointFolder::Open(path);
  ASSERT_TRUE(first.ok()) << first.status();
  Save(**first, 5, 0);
  const auto begun = (*first)->Begin(10);
  ASSERT_TRUE(begun.ok()) << begun.status();
  Write(*begun + "/file");

  auto second =
      CheckpointFolder::Open(path, {.job = (*first)->job(), .patience = absl::ZeroDuration()});
  ASSERT_TRUE(second.ok()) << second.status();
  EXPECT_EQ((*second)->job(), (*first)->job());
  EXPECT_THAT(NamesIn(path), UnorderedElementsAre("step-000000005", ".lock"));
  const auto own = (*second)->Begin(10);  // The same step.
  ASSERT_TRUE(own.ok()) << own.status();
  // The first one goes on: it publishes neither its own checkpoint, which is gone, nor the other's,
  //                        which is not whole.
  Write(*begun + "/late");
  EXPECT_TRUE(absl::IsNotFound((*first)->Publish(0).status()));
  (*first)->Discard();
  EXPECT_THAT(StepsIn(path), ElementsAre(5));
  Write(*own + "/file");
  EXPECT_TRUE((*second)->Publish(0).ok());
  EXPECT_THAT(NamesIn(path), UnorderedElementsAre("step-000000005", "step-000000010", ".lock"));
  EXPECT_THAT(NamesIn(path + "/step-000000010"), ElementsAre("file"));
}

// A rank that was lost in the first attempt still writes to it, and the others repeat the step.
TEST(CheckpointFolderTest, ALostRankWritesNothingIntoTheNextAttemptAtTheStep) {
  const std::string path = Folder("attempts");
  auto folder = CheckpointFolder::Open(path);
  ASSERT_TRUE(folder.ok()) << folder.status();
  const auto first = (*folder)->Begin(5);
  (*folder)->Discard();
  const auto second = (*folder)->Begin(5);
  ASSERT_TRUE(first.ok() && second.ok());
  Write(*second + "/file");
  Write(*first + "/late");
  ASSERT_TRUE((*folder)->Publish(0).ok());
  EXPECT_THAT(NamesIn(path + "/step-000000005"), ElementsAre("file"));
}

// A rank 0 that was lost has published it, and no other rank knows.
TEST(CheckpointFolderTest, ACompleteOneOfTheSameStepStays) {
  const std::string path = Folder("twice");
  auto folder = CheckpointFolder::Open(path);
  ASSERT_TRUE(folder.ok()) << folder.status();
  Save(**folder, 5, 0);
  const auto again = (*folder)->Begin(5);
  ASSERT_TRUE(again.ok()) << again.status();
  Write(*again + "/other");
  const auto published = (*folder)->Publish(0);
  ASSERT_TRUE(published.ok()) << published.status();
  EXPECT_EQ(*published, path + "/step-000000005");
  EXPECT_THAT(NamesIn(*published), ElementsAre("file"));
  EXPECT_THAT(NamesIn(path), UnorderedElementsAre("step-000000005", ".lock"));
}

TEST(CheckpointFolderTest, OtherJobsWaitForTheSuccessor) {
  const std::string path = Folder("waited");
  auto first = CheckpointFolder::Open(path);
  ASSERT_TRUE(first.ok()) << first.status();
  auto second = CheckpointFolder::Open(path, {.job = (*first)->job()});
  auto third = CheckpointFolder::Open(path, {.job = (*first)->job()});
  ASSERT_TRUE(second.ok() && third.ok());
  for (auto* gone : {&first, &second}) {
    for (const std::string job : {"", "another"}) {
      const absl::Status refused =
          CheckpointFolder::Open(path, {.job = job, .patience = absl::Milliseconds(30)}).status();
      EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
    }
    gone->value().reset();
  }
  third->reset();
  EXPECT_TRUE(CheckpointFolder::Open(path, {.patience = absl::ZeroDuration()}).ok());
}

TEST(CheckpointFolderTest, SaysWhatItCannotDo) {
  const std::string path = Folder("file");
  Write(path);
  EXPECT_THAT(std::string(CheckpointFolder::Open(path).status().message()), HasSubstr(path));
  EXPECT_THAT(std::string(CheckpointFolder::Open(path + "/below").status().message()),
              HasSubstr(path));
  EXPECT_FALSE(FindCheckpoints(path).ok());
}

}  // namespace
}  // namespace evenkeel
