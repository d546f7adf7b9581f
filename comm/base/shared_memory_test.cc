// Memory is shared between real processes, and taken back from one that is stopped in the middle of
// writing.

#include "evenkeel/comm/base/shared_memory.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <functional>
#include <limits>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

using testing::HasSubstr;
using Word = std::atomic<uint64_t>;
static_assert(Word::is_always_lock_free);

int64_t OpenFiles() {
  int64_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd"))
    ++count;
  return count;
}

// The words of shared memory, each written whole.
Word& At(const SharedMemory& memory, int64_t offset) {
  return *std::launder(reinterpret_cast<Word*>(memory.data() + offset));
}

// A process that has mapped the memory, until it is done.
class Child {
 public:
  Child(int fd, const std::function<void(SharedMemory&)>& body) : pid_(fork()) {
    if (pid_ != 0) return;
    auto memory = SharedMemory::Map(dup(fd));
    if (!memory.ok()) _exit(1);
    body(**memory);
    _exit(0);
  }
  ~Child() {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  void Stop() {
    kill(pid_, SIGSTOP);
    int status = 0;
    ASSERT_EQ(waitpid(pid_, &status, WUNTRACED), pid_);
    ASSERT_TRUE(WIFSTOPPED(status));
  }
  void Continue() { kill(pid_, SIGCONT); }

 private:
  const pid_t pid_;
};

void AwaitAtLeast(const Word& word, uint64_t value) {
  const absl::Time deadline = absl::Now() + absl::Seconds(60);
  while (word.load() < value) {
    ASSERT_LT(absl::Now(), deadline) << word.load() << " of " << value;
    absl::SleepFor(absl::Milliseconds(1));
  }
}

TEST(SharedMemoryTest, IsZeroedWholePages) {
  for (const int64_t bytes :
       {int64_t{0}, int64_t{1}, PageBytes(), PageBytes() + 1, int64_t{10} << 20}) {
    SCOPED_TRACE(bytes);
    const auto memory = SharedMemory::Create(bytes).value();
    EXPECT_GE(memory->bytes(), std::max<int64_t>(bytes, 1));
    EXPECT_LT(memory->bytes(), std::max<int64_t>(bytes, 1) + PageBytes());
    EXPECT_EQ(memory->bytes() % PageBytes(), 0);
    for (int64_t i = 0; i < memory->bytes(); ++i) ASSERT_EQ(memory->data()[i], std::byte{0}) << i;
    std::memset(memory->data(), 1, memory->bytes());
  }
}

TEST(SharedMemoryTest, HasItsPageTablesFromTheStart) {
  const auto mine = SharedMemory::Create(64 * PageBytes()).value();
  const auto theirs = SharedMemory::Map(dup(mine->fd())).value();
  for (const auto& memory : {mine, theirs}) {
    std::vector<uint64_t> entries(64);
    const int fd = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
    ASSERT_GE(fd, 0);
    const off_t first =
        reinterpret_cast<uintptr_t>(memory->data()) / PageBytes() * sizeof(uint64_t);
    ASSERT_EQ(pread(fd, entries.data(), entries.size() * sizeof(uint64_t), first),
              static_cast<ssize_t>(entries.size() * sizeof(uint64_t)));
    close(fd);
    for (const uint64_t entry : entries) EXPECT_TRUE(entry >> 63) << "not present";
  }
}

TEST(SharedMemoryTest, SizesThatCannotBeAreStatuses) {
  EXPECT_TRUE(absl::IsInvalidArgument(SharedMemory::Create(-1).status()));
  for (const int64_t bytes :
       {int64_t{1} << 50, int64_t{1} << 62, std::numeric_limits<int64_t>::max()}) {
    const absl::Status status = SharedMemory::Create(bytes).status();
    EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(std::to_string(bytes)));
    EXPECT_THAT(std::string(status.message()),
                testing::ContainsRegex("(host|group .*) has [0-9]+ left"));
  }
}

TEST(SharedMemoryTest, IsTheSameForBothEnds) {
  const int64_t before = OpenFiles();
  {
    const auto mine = SharedMemory::Create(3 * PageBytes()).value();
    const auto theirs = SharedMemory::Map(dup(mine->fd())).value();
    EXPECT_EQ(OpenFiles(), before + 1) << "the descriptor that was mapped is closed";
    EXPECT_EQ(theirs->bytes(), mine->bytes());
    EXPECT_EQ(theirs->fd(), -1);
    EXPECT_NE(theirs->data(), mine->data());
    At(*mine, 8) = 5;
    EXPECT_EQ(At(*theirs, 8), 5u);
    At(*theirs, 2 * PageBytes()) = 6;
    EXPECT_EQ(At(*mine, 2 * PageBytes()), 6u);
    EXPECT_NE(fcntl(mine->fd(), F_GETFD) & FD_CLOEXEC, 0);
  }
  EXPECT_EQ(OpenFiles(), before);
}

TEST(SharedMemoryTest, OutlivesWhoMadeIt) {
  auto mine = SharedMemory::Create(1).value();
  const auto theirs = SharedMemory::Map(dup(mine->fd())).value();
  At(*mine, 0) = 7;
  mine = nullptr;
  EXPECT_EQ(At(*theirs, 0), 7u);
}

TEST(SharedMemoryTest, NobodyCanResizeIt) {
  const auto memory = SharedMemory::Create(PageBytes()).value();
  EXPECT_NE(ftruncate(memory->fd(), 0), 0);
  EXPECT_NE(ftruncate(memory->fd(), 2 * PageBytes()), 0);
  EXPECT_NE(fcntl(memory->fd(), F_ADD_SEALS, F_SEAL_WRITE), 0);
}

TEST(SharedMemoryTest, AnyProcessMakesItGrow) {
  const int64_t before = OpenFiles();
  {
    const int64_t far = PageBytes() << 20;
    const auto mine = SharedMemory::CreateGrowing(PageBytes()).value();
    const auto in_child = mine->Part(PageBytes(), PageBytes()).value();
    Child child(mine->fd(), [&](SharedMemory& theirs) {
      auto part = theirs.Part(far, 2 * PageBytes()).value();
      At(*part, PageBytes()) = 7;
      At(*theirs.Part(PageBytes(), PageBytes()).value(), 0) = 8;
    });
    AwaitAtLeast(At(*in_child, 0), 8);
    const auto part = mine->Part(far + PageBytes(), PageBytes()).value();
    EXPECT_EQ(At(*part, 0), 7u);
    EXPECT_EQ(At(*mine->Part(far - PageBytes(), PageBytes()).value(), 0), 0u);
    EXPECT_TRUE(absl::IsResourceExhausted(mine->Part(far, int64_t{1} << 50).status()));
    EXPECT_EQ(ftruncate(mine->fd(), PageBytes()), -1) << "it cannot be made to shrink";
    // A peer that comes later maps what it was told of, however long the file is by now.
    const auto theirs = SharedMemory::Map(dup(mine->fd()), PageBytes()).value();
    EXPECT_EQ(theirs->bytes(), PageBytes());
    EXPECT_TRUE(absl::IsInvalidArgument(SharedMemory::Map(dup(mine->fd()), far << 20).status()));
  }
  EXPECT_EQ(OpenFiles(), before);
}

TEST(SharedMemoryTest, RefusesWhatMayShrink) {
  const int64_t before = OpenFiles();
  const auto expect_refused = [](int fd) {
    const absl::Status status = SharedMemory::Map(fd).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  };
  const int unsealed = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  ASSERT_EQ(ftruncate(unsealed, PageBytes()), 0);
  expect_refused(unsealed);
  const int empty = memfd_create("test", MFD_CLOEXEC | MFD_ALLOW_SEALING);
  ASSERT_EQ(fcntl(empty, F_ADD_SEALS, F_SEAL_SHRINK), 0);
  expect_refused(empty);
  int ends[2];
  ASSERT_EQ(pipe(ends), 0);
  expect_refused(ends[0]);
  expect_refused(ends[1]);
  expect_refused(open("/proc/self/exe", O_RDONLY | O_CLOEXEC));
  expect_refused(-1);
  EXPECT_EQ(OpenFiles(), before) << "what is refused is closed too";
}

TEST(SharedMemoryTest, WhatIsFencedIsOutOfReachForAnotherProcess) {
  constexpr int kPages = 8;
  const auto memory = SharedMemory::Create((kPages + 1) * PageBytes()).value();
  Word& go = At(*memory, kPages * PageBytes());
  Word& done = At(*memory, kPages * PageBytes() + 8);
  for (int page = 0; page < kPages; ++page) At(*memory, page * PageBytes()) = page;
  Child child(memory->fd(), [&](SharedMemory& theirs) {
    while (At(theirs, kPages * PageBytes()) == 0) usleep(100);
    for (int page = 0; page < kPages; ++page) At(theirs, page * PageBytes()) = 100 + page;
    At(theirs, kPages * PageBytes() + 8) = 1;
    while (true) pause();
  });
  std::byte* const data = memory->data();
  memory->Fence(2 * PageBytes(), 3 * PageBytes());
  memory->Fence(4 * PageBytes(), 2 * PageBytes());  // Some of it once more.
  memory->Fence(0, 0);
  go = 1;
  AwaitAtLeast(done, 1);
  EXPECT_EQ(memory->data(), data);
  for (int page = 0; page < kPages; ++page) {
    const bool is_fenced = 2 <= page && page < 6;
    EXPECT_EQ(At(*memory, page * PageBytes()), is_fenced ? page : 100u + page) << page;
    At(*memory, page * PageBytes()) = 7;  // Mine to write as ever.
  }
}

// The child counts all words up, over and over, and is stopped anywhere in that.
TEST(SharedMemoryTest, AProcessThatIsStoppedInTheMiddleOfWritingReachesNobodyWhenItGoesOn) {
  constexpr int kPages = 64;
  const int64_t data_bytes = kPages * PageBytes();
  const auto memory = SharedMemory::Create(data_bytes + PageBytes()).value();
  Word& rounds = At(*memory, data_bytes);
  Child child(memory->fd(), [&](SharedMemory& theirs) {
    for (uint64_t round = 1;; ++round) {
      for (int64_t at = 0; at < data_bytes; at += 8) At(theirs, at) = round;
      At(theirs, data_bytes) = round;
    }
  });
  AwaitAtLeast(rounds, 3);
  for (int page = 1; page + 20 < kPages;
       page += 20) {  // Each time some more; the first and the last page stay shared.
    child.Stop();
    std::vector<std::byte> content(memory->data(), memory->data() + data_bytes);
    memory->Fence(page * PageBytes(), 20 * PageBytes());
    EXPECT_EQ(std::memcmp(memory->data(), content.data(), data_bytes), 0) << "the content stays";
    const uint64_t round = rounds;
    child.Continue();
    AwaitAtLeast(rounds, round + 3);
    const int64_t fenced_end = (page + 20) * PageBytes();
    for (int64_t at = PageBytes(); at < fenced_end; at += 8) {
      uint64_t was = 0;
      std::memcpy(&was, &content[at], sizeof(was));
      ASSERT_EQ(At(*memory, at), was) << at;
    }
    EXPECT_GT(At(*memory, 0), round);
    EXPECT_GT(At(*memory, data_bytes - 8), round);
  }
}

// User code on another thread does not notice a fence.
TEST(SharedMemoryTest, WhoReadsDuringAFenceSeesNoHole) {
  const auto memory = SharedMemory::Create(16 * PageBytes()).value();
  for (int64_t at = 0; at < memory->bytes(); at += 8) At(*memory, at) = at + 1;
  std::atomic<bool> is_over = false;
  std::atomic<int64_t> wrong = 0, reads = 0;
  std::thread reader([&] {
    while (!is_over) {
      for (int64_t at = 0; at < memory->bytes(); at += 512)
        wrong += At(*memory, at) != static_cast<uint64_t>(at + 1);
      ++reads;
    }
  });
  while (reads == 0) std::this_thread::yield();
  for (int i = 0; i < 500; ++i) memory->Fence((i % 8) * PageBytes(), 8 * PageBytes());
  is_over = true;
  reader.join();
  EXPECT_EQ(wrong, 0) << "in " << reads << " rounds";
}

TEST(SharedMemoryDeathTest, AFenceThatIsNotWholePagesOfItIsRefused) {
  testing::FLAGS_gtest_death_test_style = "threadsafe";
  const auto memory = SharedMemory::Create(2 * PageBytes()).value();
  EXPECT_DEATH(memory->Fence(8, PageBytes()), "Fence.8, ");
  EXPECT_DEATH(memory->Fence(0, 3 * PageBytes()), "Fence.0, ");
  EXPECT_DEATH(memory->Fence(-PageBytes(), PageBytes()), "Fence.-");
}

}  // namespace
}  // namespace evenkeel::internal
