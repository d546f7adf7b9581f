#include "evenkeel/comm/shm/registered_memory.h"

#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <optional>
#include <set>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"
#include "evenkeel/comm/backend.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

using testing::ElementsAre;

const std::byte* BytesOf(const Memory& memory) {
  return static_cast<const std::byte*>(memory.data.get());
}

TEST(RegisteredMemoryTest, IsFoundByAnyOfItsBytes) {
  const int64_t page = PageBytes();
  const Memory memory = AllocateRegistered(3 * page - 100).value();
  EXPECT_EQ(memory.bytes, 3 * page - 100);
  const std::byte* const data = BytesOf(memory);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(data) % page, 0u);
  EXPECT_EQ(data[memory.bytes - 1], std::byte{0});
  struct Case {
    int64_t offset, bytes;
    bool is_found, is_writable;
  };
  const Case cases[] = {
      {0, memory.bytes, true, true},
      {0, 3 * page, true, true},
      {0, page, true, true},
      {page, 2 * page - 100, true, true},
      {page, 2 * page - 101, true, false},  // Some of the user's bytes follow in the last page.
      {0, page - 1, true, false},
      {1, memory.bytes - 1, true, false},  // Some of the user's bytes precede in the first page.
      {64, 64, true, false},
      {2 * page, 0, true, true},
      {0, 0, true, true},
      {8, 0, true, false},
      {3 * page - 1, 1, true, false},
      {0, 3 * page + 1, false, false},
      {3 * page - 1, 2, false, false},
      {-1, 2, false, false},
      {-1, 1, false, false},
      {0, -1, false, false},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(testing::Message() << c.bytes << " bytes at " << c.offset);
    const std::optional<RegisteredRange> range = FindRegistered(data + c.offset, c.bytes);
    ASSERT_EQ(range.has_value(), c.is_found);
    if (!range) continue;
    EXPECT_EQ(range->offset, c.offset);
    EXPECT_EQ(range->is_writable, c.is_writable);
    EXPECT_EQ(range->in->memory->data(), data);
    EXPECT_GE(range->in->memory->fd(), 0);
  }
}

TEST(RegisteredMemoryTest, OtherMemoryIsNotFound) {
  const Memory memory = AllocateRegistered(1).value();
  int64_t here = 0;
  static int64_t there = 0;
  const std::vector<int64_t> heap(1000);
  EXPECT_FALSE(FindRegistered(&here, 8));
  EXPECT_FALSE(FindRegistered(&there, 8));
  EXPECT_FALSE(FindRegistered(heap.data(), 8000));
  EXPECT_FALSE(FindRegistered(nullptr, 0));
  EXPECT_FALSE(FindRegistered(nullptr, 8));
  EXPECT_FALSE(FindRegistered(BytesOf(memory), INT64_MAX));
  EXPECT_FALSE(FindRegistered(reinterpret_cast<const void*>(UINTPTR_MAX), 2)) << "wraps around";
}

TEST(RegisteredMemoryTest, NoBytesAreAPage) {
  const Memory memory = AllocateRegistered(0).value();
  EXPECT_EQ(memory.bytes, 0);
  ASSERT_NE(memory.data, nullptr);
  std::memset(memory.data.get(), 1, PageBytes());
  EXPECT_TRUE(FindRegistered(memory.data.get(), 0).has_value());
}

TEST(RegisteredMemoryTest, SizesThatCannotBeAreStatuses) {
  EXPECT_TRUE(absl::IsInvalidArgument(AllocateRegistered(-1).status()));
  EXPECT_TRUE(absl::IsResourceExhausted(AllocateRegistered(int64_t{1} << 62).status()));
}

TEST(RegisteredMemoryTest, IsFoundAmongManyUntilItIsFreed) {
  std::vector<Memory> all;
  std::set<uint64_t> ids;
  for (int i = 0; i < 50; ++i) all.push_back(AllocateRegistered(1 + i * 100).value());
  for (const Memory& memory : all) {
    const std::optional<RegisteredRange> range = FindRegistered(memory.data.get(), memory.bytes);
    ASSERT_TRUE(range.has_value());
    EXPECT_EQ(range->in->memory->data(), BytesOf(memory));
    EXPECT_NE(range->in->id, 0u);
    EXPECT_TRUE(ids.insert(range->in->id).second) << "given twice";
  }
  for (size_t i = 0; i < all.size(); i += 2) {
    const void* const gone = all[i].data.get();
    all[i] = Memory();
    EXPECT_FALSE(FindRegistered(gone, 1));
  }
  for (size_t i = 1; i < all.size(); i += 2) {
    EXPECT_EQ(FindRegistered(all[i].data.get(), all[i].bytes).value().in->memory->data(),
              BytesOf(all[i]));
  }
  all.clear();
  const Memory next = AllocateRegistered(1).value();
  EXPECT_TRUE(ids.insert(FindRegistered(next.data.get(), 1)->in->id).second) << "given twice";
}

TEST(RegisteredMemoryTest, NeighboursAreTwoPieces) {
  std::vector<Memory> all;  // The kernel puts some of them side by side.
  for (int i = 0; i < 20; ++i) all.push_back(AllocateRegistered(PageBytes()).value());
  for (const Memory& memory : all) {
    EXPECT_TRUE(FindRegistered(memory.data.get(), PageBytes()));
    EXPECT_FALSE(FindRegistered(memory.data.get(), PageBytes() + 1));
  }
}

TEST(RegisteredMemoryTest, WhatIsRetiredIsNotFoundButStays) {
  const Memory memory = AllocateRegistered(2 * PageBytes()).value();
  const std::optional<RegisteredRange> range = FindRegistered(memory.data.get(), 1);
  ASSERT_TRUE(range.has_value());
  range->in->memory->Fence(0, PageBytes());
  range->in->is_retired = true;
  EXPECT_FALSE(FindRegistered(memory.data.get(), 1));
  std::memset(memory.data.get(), 1, memory.bytes);
}

TEST(RegisteredMemoryTest, AnOperationKeepsWhatItHasFound) {
  Memory memory = AllocateRegistered(1).value();
  const std::optional<RegisteredRange> range = FindRegistered(memory.data.get(), 1);
  memory = Memory();
  *range->in->memory->data() = std::byte{1};
}

// A peer that has nothing to do does not look, and still has it mapped.
TEST(RegisteredMemoryTest, WhatIsFreedTakesNoMemoryThoughAPeerHasIt) {
  Memory memory = AllocateRegistered(1 << 20).value();
  std::memset(memory.data.get(), 7, memory.bytes);
  const int fd = FindRegistered(BytesOf(memory), 1)->in->memory->fd();
  const int watched = dup(fd);
  const std::shared_ptr<SharedMemory> peers = SharedMemory::Map(dup(fd)).value();
  EXPECT_EQ(peers->data()[1000], std::byte{7});
  memory = {};
  struct stat file = {};
  ASSERT_EQ(fstat(watched, &file), 0);
  EXPECT_EQ(file.st_blocks, 0);
  EXPECT_EQ(peers->data()[1000], std::byte{0});
  close(watched);
}

TEST(RegisteredMemoryTest, AChildThatIsForkedFreesNothingOfItsParents) {
  Memory memory = AllocateRegistered(1 << 20).value();
  std::memset(memory.data.get(), 7, memory.bytes);
  const pid_t child = fork();
  if (child == 0) {
    FindRegistered(BytesOf(memory), 1)->in->memory->Fence(0, PageBytes());
    memory = {};
    _exit(0);
  }
  int status = 1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(BytesOf(memory)[1000], std::byte{7});
  EXPECT_EQ(BytesOf(memory)[1 << 19], std::byte{7});
}

TEST(RegisteredMemoryTest, WhoWantsToKnowIsToldOfWhatIsFreed) {
  std::vector<uint64_t> first, second;
  std::shared_ptr<void> first_handle =
      WhenRegisteredIsFreed([&](uint64_t id) { first.push_back(id); });
  ASSERT_NE(first_handle, nullptr);
  std::shared_ptr<void> second_handle = WhenRegisteredIsFreed([&](uint64_t id) {
    second.push_back(id);
    EXPECT_FALSE(FindRegistered(&second, 1)) << "the table is not locked meanwhile";
  });
  std::vector<Memory> all;
  std::vector<uint64_t> ids;
  for (int i = 0; i < 3; ++i) {
    all.push_back(AllocateRegistered(1).value());
    ids.push_back(FindRegistered(all.back().data.get(), 1)->in->id);
  }
  const Memory copy = all[0];
  all[0] = Memory();
  EXPECT_TRUE(first.empty()) << "the user has a copy";
  all[1] = Memory();
  first_handle = nullptr;
  all[2] = Memory();
  EXPECT_THAT(first, ElementsAre(ids[1]));
  EXPECT_THAT(second, ElementsAre(ids[1], ids[2]));
}

TEST(RegisteredMemoryTest, NobodyIsToldOnceItsHandleIsGone) {
  absl::Notification is_called, may_return;
  auto state = std::make_unique<std::atomic<int>>(0);
  std::shared_ptr<void> handle = WhenRegisteredIsFreed([&, state = state.get()](uint64_t) {
    is_called.Notify();
    may_return.WaitForNotification();
    ++*state;
  });
  Memory memory = AllocateRegistered(1).value();
  std::thread frees([&] { memory = Memory(); });
  is_called.WaitForNotification();
  std::atomic<bool> is_gone = false;
  std::thread leaves([&] {
    handle = nullptr;
    EXPECT_EQ(*state, 1) << "the call was still on its way";
    is_gone = true;
    state = nullptr;
  });
  EXPECT_FALSE(is_gone);
  may_return.Notify();
  leaves.join();
  frees.join();
  AllocateRegistered(1).IgnoreError();
}

TEST(RegisteredMemoryTest, ThreadsMayDoAllOfItAtOnce) {
  std::atomic<int64_t> told = 0;
  const std::shared_ptr<void> handle = WhenRegisteredIsFreed([&](uint64_t) { ++told; });
  constexpr int kThreads = 4, kRounds = 200;
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) {
    threads.emplace_back([&] {
      for (int round = 0; round < kRounds; ++round) {
        const Memory memory = AllocateRegistered(round).value();
        const std::optional<RegisteredRange> range =
            FindRegistered(memory.data.get(), memory.bytes);
        ASSERT_TRUE(range.has_value());
        ASSERT_EQ(range->in->memory->data(), BytesOf(memory));
        const std::shared_ptr<void> mine = WhenRegisteredIsFreed([](uint64_t) {});
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(told, kThreads * kRounds);
}

}  // namespace
}  // namespace evenkeel::internal
