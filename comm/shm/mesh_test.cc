#include "evenkeel/comm/shm/mesh.h"

#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/base/bytes.h"
#include "evenkeel/comm/base/shared_memory.h"
#include "evenkeel/comm/net/peer_meeting.h"
#include "evenkeel/comm/net/socket.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

using testing::HasSubstr;
using MemoryOr = absl::StatusOr<std::shared_ptr<SharedMemory>>;

constexpr absl::Duration kSoon = absl::Seconds(30);

int64_t OpenFiles() {
  int64_t count = 0;
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd"))
    ++count;
  return count;
}

std::shared_ptr<SharedMemory> MemoryWith(char value, int64_t bytes = 1) {
  auto memory = SharedMemory::Create(bytes).value();
  std::memset(memory->data(), value, memory->bytes());
  return memory;
}

// The ranks of a group, all in this process.
struct Meshes {
  explicit Meshes(int world_size, absl::string_view key = "the key") {
    for (int rank = 0; rank < world_size; ++rank) {
      all.push_back(ShmMesh::Listen(rank, {"world", world_size, std::string(key)}).value());
      addresses.push_back(all.back()->address());
    }
  }
  // Each on a thread of its own.
  void Connect() {
    std::vector<std::thread> threads;
    for (auto& mesh : all) {
      threads.emplace_back([&] {
        const absl::Status status = mesh->Connect(addresses, absl::Now() + kSoon);
        EXPECT_TRUE(status.ok()) << status;
      });
    }
    for (std::thread& thread : threads) thread.join();
  }
  ShmMesh& operator[](int rank) { return *all[rank]; }

  std::vector<std::unique_ptr<ShmMesh>> all;
  std::vector<std::string> addresses;
};

TEST(ShmMeshTest, WhatARankGivesAllOthersFind) {
  const int64_t before = OpenFiles();
  for (const int world_size : {1, 2, 3, 5}) {
    SCOPED_TRACE(world_size);
    Meshes ranks(world_size);
    ranks.Connect();
    std::vector<std::shared_ptr<SharedMemory>> mine;
    for (int rank = 0; rank < world_size; ++rank) {
      mine.push_back(MemoryWith('a' + rank, 100 * rank));
      EXPECT_TRUE(ranks[rank].Give(7, *mine.back()).ok());
      EXPECT_TRUE(ranks[rank].Give(7, *mine.back()).ok()) << "once more costs nothing";
    }
    for (int rank = 0; rank < world_size; ++rank) {
      for (int peer = 0; peer < world_size; ++peer) {
        if (peer == rank) continue;
        const MemoryOr theirs = ranks[rank].Find(peer, 7);
        ASSERT_TRUE(theirs.ok()) << theirs.status();
        EXPECT_EQ(*(*theirs)->data(), std::byte('a' + peer));
        EXPECT_EQ((*theirs)->bytes(), mine[peer]->bytes());
        *mine[peer]->data() = std::byte{1};
        EXPECT_EQ(*(*theirs)->data(), std::byte{1}) << "it is the same memory";
        *mine[peer]->data() = std::byte('a' + peer);
        EXPECT_EQ(ranks[rank].Find(peer, 7)->get(), theirs->get()) << "mapped once";
      }
    }
  }
  EXPECT_EQ(OpenFiles(), before);
}

TEST(ShmMeshTest, NothingIsFoundBeforeItIsGiven) {
  Meshes ranks(2);
  ranks.Connect();
  const absl::Status status = ranks[0].Find(1, 3).status();
  EXPECT_TRUE(absl::IsNotFound(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("rank 1: has not given memory 3"));
  ASSERT_TRUE(ranks[1].Give(4, *MemoryWith('x')).ok());
  EXPECT_TRUE(absl::IsNotFound(ranks[0].Find(1, 3).status()));
  EXPECT_TRUE(ranks[0].Find(1, 4).ok());
}

TEST(ShmMeshTest, WrongCallsAreStatuses) {
  EXPECT_TRUE(absl::IsInvalidArgument(ShmMesh::Listen(2, {"world", 2, "the key"}).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(ShmMesh::Listen(-1, {"world", 2, "the key"}).status()));
  Meshes ranks(2);
  EXPECT_TRUE(absl::IsFailedPrecondition(ranks[0].Give(1, *MemoryWith('x'))));
  EXPECT_TRUE(absl::IsInvalidArgument(ranks[0].Find(1, 1).status())) << "not connected yet";
  ranks[0].TakeBack(1);
  ranks.Connect();
  for (const int peer : {-1, 0, 2})
    EXPECT_TRUE(absl::IsInvalidArgument(ranks[0].Find(peer, 1).status())) << peer;
  ASSERT_TRUE(ranks[0].Give(1, *MemoryWith('x')).ok());
  EXPECT_TRUE(absl::IsInvalidArgument(ranks[1].Give(1, *ranks[1].Find(0, 1).value())))
      << "it has no descriptor";
  EXPECT_TRUE(absl::IsFailedPrecondition(ranks[0].Connect(ranks.addresses, absl::Now() + kSoon)));
}

TEST(ShmMeshTest, WhatIsTakenBackIsUnmappedOnceNobodyUsesIt) {
  const int64_t before = OpenFiles();
  Meshes ranks(2);
  ranks.Connect();
  ASSERT_TRUE(ranks[0].Give(1, *MemoryWith('x')).ok());
  std::shared_ptr<SharedMemory> used = ranks[1].Find(0, 1).value();
  const std::weak_ptr<SharedMemory> seen = used;
  ranks[0].TakeBack(1);
  ranks[0].TakeBack(1);  // It is not anybody's any more.
  ASSERT_TRUE(ranks[0].Give(2, *MemoryWith('y')).ok());
  EXPECT_TRUE(ranks[1].Find(0, 2).ok());
  EXPECT_TRUE(absl::IsNotFound(ranks[1].Find(0, 1).status()));
  EXPECT_EQ(*used->data(), std::byte{'x'});
  used = nullptr;
  EXPECT_TRUE(seen.expired());
  // Not mapped yet when it is taken back; and a rank that gives nothing new is noticed too.
  ranks[0].TakeBack(2);
  int finds = 0;
  while (ranks[1].Find(0, 2).ok()) ASSERT_LT(++finds, 100);
  ASSERT_TRUE(ranks[0].Give(3, *MemoryWith('z')).ok());
  ranks[0].TakeBack(3);
  EXPECT_TRUE(absl::IsNotFound(ranks[1].Find(0, 3).status()));
  ranks.all.clear();
  EXPECT_EQ(OpenFiles(), before);
}

TEST(ShmMeshTest, APeerThatDoesNotReadHoldsNobodyUp) {
  constexpr uint64_t kPieces = 1000;
  Meshes ranks(3);
  ranks.Connect();
  const auto memory = MemoryWith('x');
  std::vector<uint64_t> unsent;
  for (uint64_t id = 1; id <= kPieces; ++id) {
    const absl::Status status = ranks[0].Give(id, *memory);
    EXPECT_TRUE(ranks[1].Find(0, id).ok()) << "rank 1 reads, so it gets each";
    if (status.ok()) continue;
    ASSERT_TRUE(absl::IsUnavailable(status)) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr("to rank 2"));
    unsent.push_back(id);
  }
  ASSERT_FALSE(unsent.empty());
  const uint64_t first_unsent = unsent.front();
  ASSERT_GT(first_unsent, 20u);
  // Some that rank 2 has been sent, and some that it has not: none of that has room now.
  for (uint64_t id = first_unsent - 10; id < first_unsent + 10; ++id) ranks[0].TakeBack(id);
  for (uint64_t id = 1; id <= kPieces; ++id) {
    if (first_unsent - 10 <= id && id < first_unsent + 10) continue;
    const absl::Time deadline = absl::Now() + kSoon;
    while (!ranks[0].Give(id, *memory).ok()) {
      ranks[2].Find(0, id).IgnoreError();
      ASSERT_LT(absl::Now(), deadline);
    }
    const MemoryOr found = ranks[2].Find(0, id);
    ASSERT_TRUE(found.ok()) << found.status();
  }
  ASSERT_TRUE(ranks[0].Give(kPieces + 1, *memory).ok());
  for (const int rank : {1, 2}) {
    EXPECT_TRUE(ranks[rank].Find(0, kPieces + 1).ok()) << "and so all that came before it is known";
    for (uint64_t id = first_unsent - 10; id < first_unsent + 10; ++id) {
      EXPECT_TRUE(absl::IsNotFound(ranks[rank].Find(0, id).status())) << id << " on rank " << rank;
    }
  }
}

TEST(ShmMeshTest, APeerThatIsGoneIsNoError) {
  const int64_t before = OpenFiles();
  Meshes ranks(3);
  ranks.Connect();
  ASSERT_TRUE(ranks[0].Give(1, *MemoryWith('a')).ok());
  ASSERT_TRUE(ranks[1].Give(1, *MemoryWith('b')).ok());
  ranks.all[1] = nullptr;  // It has not read all.
  EXPECT_TRUE(ranks[0].Give(2, *MemoryWith('c')).ok());
  EXPECT_TRUE(ranks[0].Give(3, *MemoryWith('d')).ok());
  ranks[0].TakeBack(2);
  EXPECT_TRUE(ranks[2].Find(0, 3).ok());
  EXPECT_TRUE(ranks[0].Find(1, 1).ok()) << "what it gave before";
  EXPECT_TRUE(ranks[2].Find(1, 1).ok());
  EXPECT_TRUE(absl::IsNotFound(ranks[0].Find(1, 2).status()));
  ranks.all.clear();
  EXPECT_EQ(OpenFiles(), before);
}

TEST(ShmMeshTest, ThreadsMayDoAllOfItAtOnce) {
  constexpr uint64_t kRounds = 200;
  Meshes ranks(3);
  ranks.Connect();
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 3; ++rank) {
    for (int half = 0; half < 2; ++half) {
      threads.emplace_back([&, rank, half] {
        for (uint64_t id = 1 + half; id <= kRounds; id += 2) {
          const auto mine = MemoryWith(static_cast<char>(id));
          while (!ranks[rank].Give(id, *mine).ok()) std::this_thread::yield();
          for (int peer = 0; peer < 3; ++peer) {
            if (peer == rank) continue;
            const absl::Time deadline = absl::Now() + kSoon;
            MemoryOr theirs = ranks[rank].Find(peer, id);
            while (absl::IsNotFound(theirs.status())) {
              ASSERT_LT(absl::Now(), deadline);
              std::this_thread::yield();
              theirs = ranks[rank].Find(peer, id);
            }
            ASSERT_TRUE(theirs.ok()) << theirs.status();
            ASSERT_EQ(*(*theirs)->data(), static_cast<std::byte>(id));
          }
          // And what nobody looks for.
          ranks[rank].Give(kRounds + id, *mine).IgnoreError();
          ranks[rank].TakeBack(kRounds + id);
        }
      });
    }
  }
  for (std::thread& thread : threads) thread.join();
}

// Rank 1 is a process of its own, and dies.
TEST(ShmMeshTest, TwoProcesses) {
  int to_child[2], to_parent[2];
  ASSERT_EQ(pipe(to_child), 0);
  ASSERT_EQ(pipe(to_parent), 0);
  const auto run = [&](int rank, int in, int out) -> absl::StatusOr<std::unique_ptr<ShmMesh>> {
    absl::StatusOr<std::unique_ptr<ShmMesh>> mesh = ShmMesh::Listen(rank, {"world", 2, "the key"});
    if (!mesh.ok()) return mesh;
    std::vector<std::string> addresses(2, (*mesh)->address());
    std::string& other =
        addresses[1 - rank];  // Addresses may differ in length: shorter ones are padded.
    std::string mine = (*mesh)->address();
    mine.resize(200, ' ');
    other.resize(200);
    if (write(out, mine.data(), 200) != 200 || read(in, other.data(), 200) != 200) {
      return absl::InternalError("pipe");
    }
    other.resize(other.find(' '));
    const absl::Status status = (*mesh)->Connect(addresses, absl::Now() + kSoon);
    if (!status.ok()) return status;
    return mesh;
  };
  const auto await = [](ShmMesh& mesh, int peer, uint64_t id) {
    const absl::Time deadline = absl::Now() + kSoon;
    MemoryOr found = mesh.Find(peer, id);
    while (absl::IsNotFound(found.status()) && absl::Now() < deadline) found = mesh.Find(peer, id);
    return found;
  };
  const pid_t child = fork();
  if (child == 0) {
    const auto mesh = run(1, to_child[0], to_parent[1]);
    if (!mesh.ok()) _exit(1);
    const auto mine = SharedMemory::Create(1).value();
    if (!(*mesh)->Give(9, *mine).ok()) _exit(2);
    const MemoryOr theirs = await(**mesh, 0, 5);
    if (!theirs.ok() || *(*theirs)->data() != std::byte{'p'}) _exit(3);
    *(*theirs)->data() = std::byte{'c'};
    *mine->data() = std::byte{'m'};
    _exit(0);
  }
  const auto mesh = run(0, to_parent[0], to_child[1]);
  ASSERT_TRUE(mesh.ok()) << mesh.status();
  const auto mine = MemoryWith('p');
  ASSERT_TRUE((*mesh)->Give(5, *mine).ok());
  const MemoryOr theirs = await(**mesh, 1, 9);
  ASSERT_TRUE(theirs.ok()) << theirs.status();
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << status;
  EXPECT_EQ(*mine->data(), std::byte{'c'});
  EXPECT_EQ(*(*theirs)->data(), std::byte{'m'}) << "it outlives who made it";
  EXPECT_TRUE((*mesh)->Give(6, *mine).ok());
  for (const int fd : {to_child[0], to_child[1], to_parent[0], to_parent[1]}) close(fd);
}

// Rank 0 is a mesh, rank 1 a socket that says what the test wants.
struct Spoken {
  Spoken() {
    mesh = ShmMesh::Listen(0, {"world", 2, "the key"}).value();
    auto meeting = PeerMeeting::OnThisHost(1, {"world", 2, "the key"}).value();
    std::thread connects([&] {
      EXPECT_TRUE(mesh->Connect({mesh->address(), ""}, absl::Now() + kSoon).ok());
    });
    auto connections = meeting->Run({mesh->address(), ""}, absl::Now() + kSoon);
    connects.join();
    EXPECT_TRUE(connections.ok()) << connections.status();
    fd = std::move((*connections)[0]);
  }
  void Say(absl::string_view text, const std::vector<int>& descriptors = {}) {
    std::string bytes(text);
    iovec part = {bytes.data(), bytes.size()};
    msghdr header = {};
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    alignas(cmsghdr) char control[CMSG_SPACE(8 * sizeof(int))] = {};
    if (!descriptors.empty()) {
      header.msg_control = control;
      header.msg_controllen = CMSG_SPACE(descriptors.size() * sizeof(int));
      cmsghdr* const item = CMSG_FIRSTHDR(&header);
      item->cmsg_level = SOL_SOCKET;
      item->cmsg_type = SCM_RIGHTS;
      item->cmsg_len = CMSG_LEN(descriptors.size() * sizeof(int));
      std::memcpy(CMSG_DATA(item), descriptors.data(), descriptors.size() * sizeof(int));
    }
    ASSERT_EQ(sendmsg(fd.get(), &header, MSG_NOSIGNAL), static_cast<ssize_t>(text.size()));
  }

  std::unique_ptr<ShmMesh> mesh;
  UniqueFd fd;
};

std::string Given(uint64_t id, int64_t bytes) {
  return ByteWriter().U8(1).U64(id).I64(bytes).Take();
}
std::string TakenBack(uint64_t id) { return ByteWriter().U8(2).U64(id).I64(0).Take(); }

TEST(ShmMeshTest, MessagesThatMakeNoSenseAreErrorsThatNameThePeer) {
  const auto memory = MemoryWith('x');
  const int64_t page = memory->bytes();
  const int fd = memory->fd();
  const int64_t before = OpenFiles();
  struct Case {
    const char* what;
    std::string text;
    std::vector<int> descriptors;
    absl::StatusCode code = absl::StatusCode::kInternal;
  };
  const Case cases[] = {
      {"text", "hello", {}},
      {"too long", std::string(1000, 'x'), {}},
      {"too long, with a descriptor", Given(2, page) + std::string(1000, 'x'), {fd}},
      {"no descriptor", Given(2, page), {}},
      {"two descriptors", Given(2, page), {fd, fd}, absl::StatusCode::kResourceExhausted},
      {"a descriptor that is no memory",
       Given(2, page),
       {STDERR_FILENO},
       absl::StatusCode::kInvalidArgument},
      {"another size", Given(2, page + 1), {fd}, absl::StatusCode::kInvalidArgument},
      {"given twice", Given(1, page), {fd}},
      {"taken back but never given", TakenBack(2), {}},
      {"taken back with a descriptor", TakenBack(1), {fd}},
      {"unknown", ByteWriter().U8(3).U64(2).I64(page).Take(), {fd}},
  };
  for (const Case& c : cases) {
    SCOPED_TRACE(c.what);
    Spoken ranks;
    ranks.Say(Given(1, page), {fd});
    ranks.Say(c.text, c.descriptors);
    for (int i = 0; i < 2; ++i) {
      const absl::Status status = ranks.mesh->Find(1, 2).status();
      EXPECT_EQ(status.code(), c.code) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr("rank 1"));
    }
  }
  EXPECT_EQ(OpenFiles(), before) << "no descriptor is left";
}

TEST(ShmMeshTest, WithoutDescriptorsItIsAnError) {
  const auto memory = MemoryWith('x');
  Spoken ranks;
  ranks.Say(Given(1, memory->bytes()), {memory->fd()});
  rlimit was = {};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &was), 0);
  rlimit none = was;
  none.rlim_cur = 3;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  const absl::Status status = ranks.mesh->Find(1, 1).status();
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &was), 0);
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
}

TEST(ShmMeshTest, CloseEndsConnect) {
  Meshes ranks(2);
  absl::Status status;
  std::thread connects([&] { status = ranks[0].Connect(ranks.addresses, absl::Now() + kSoon); });
  absl::SleepFor(
      absl::Milliseconds(20));  // So that it is waiting, most of the time; the result is the same.
  ranks[0].Close();
  connects.join();
  EXPECT_TRUE(absl::IsCancelled(status)) << status;
  ranks[1].Close();
  EXPECT_TRUE(absl::IsCancelled(ranks[1].Connect(ranks.addresses, absl::Now() + kSoon)));
}

TEST(HostIdentityTest, IsTheSameForProcessesOfAHost) {
  const std::string identity = HostIdentity().value();
  EXPECT_EQ(HostIdentity().value(), identity);
  EXPECT_GT(identity.size(), 36u);
  const pid_t child = fork();
  if (child == 0) _exit(HostIdentity().value() == identity ? 0 : 1);
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

}  // namespace
}  // namespace evenkeel::internal
