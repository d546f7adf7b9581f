// The meetings of all ranks of a group in this process, and a caller that sends what a test wants.
//
//   PeerMeetings meetings(PeerMeetings::OnThisHost, 3);
//   meetings.StartAll();
//   meetings.ExpectConnected();

#ifndef EVENKEEL_COMM_TESTING_PEER_MEETINGS_H_
#define EVENKEEL_COMM_TESTING_PEER_MEETINGS_H_

#include <fcntl.h>
#include <poll.h>
#include <sys/resource.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/net/frame.h"
#include "evenkeel/comm/net/peer_address.h"
#include "evenkeel/comm/net/peer_greeting.h"
#include "evenkeel/comm/net/peer_line.h"
#include "evenkeel/comm/net/peer_meeting.h"
#include "evenkeel/comm/net/socket.h"
#include "evenkeel/comm/status.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {

inline constexpr absl::Duration kSoon = absl::Seconds(30);

inline PeerGroup GroupOf(int world_size) {
  return {.name = "world", .world_size = world_size, .key = "the key"};
}

// While it lives, the process can open no file. Its open files stay usable: poll() needs a limit
// that is not below the number of its entries.
class NoDescriptors {
 public:
  NoDescriptors() {
    EXPECT_EQ(getrlimit(RLIMIT_NOFILE, &before_), 0);
    const UniqueFd lowest_free(open("/dev/null", O_RDONLY | O_CLOEXEC));
    const rlimit none = {.rlim_cur = static_cast<rlim_t>(lowest_free.get()),
                         .rlim_max = before_.rlim_max};
    EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  }
  ~NoDescriptors() { EXPECT_EQ(setrlimit(RLIMIT_NOFILE, &before_), 0); }
  NoDescriptors(const NoDescriptors&) = delete;
  NoDescriptors& operator=(const NoDescriptors&) = delete;

 private:
  rlimit before_ = {};
};

// Each meeting runs on a thread of its own.
class PeerMeetings {
 public:
  using Make = std::function<absl::StatusOr<std::unique_ptr<PeerMeeting>>(int rank, PeerGroup)>;

  static absl::StatusOr<std::unique_ptr<PeerMeeting>> OnThisHost(int rank, PeerGroup group) {
    return PeerMeeting::OnThisHost(rank, std::move(group));
  }
  static absl::StatusOr<std::unique_ptr<PeerMeeting>> OverTcp(int rank, PeerGroup group) {
    return PeerMeeting::OverTcp(rank, std::move(group), "127.0.0.1");
  }

  PeerMeetings(const Make& make, int world_size, const std::function<PeerGroup(int)>& group_of) {
    for (int rank = 0; rank < world_size; ++rank) {
      meetings_.push_back(make(rank, group_of(rank)).value());
      addresses_.push_back(meetings_.back()->address());
    }
    results_.assign(world_size, absl::UnknownError("not run"));
    connections_.resize(world_size);
  }
  PeerMeetings(const Make& make, int world_size)
      : PeerMeetings(make, world_size, [&](int) { return GroupOf(world_size); }) {}
  ~PeerMeetings() { Join(); }

  void Start(int rank, absl::Duration timeout = kSoon) {
    threads_.emplace_back([this, rank, timeout] {
      auto connections = meetings_[rank]->Run(addresses_, SteadyNow() + timeout);
      results_[rank] = connections.status();
      if (connections.ok()) connections_[rank] = *std::move(connections);
    });
  }
  void StartAll() {
    for (size_t rank = 0; rank < meetings_.size(); ++rank) Start(static_cast<int>(rank));
  }
  void Join() {
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
  }

  PeerMeeting& operator[](int rank) { return *meetings_[rank]; }
  PeerAddress address(int rank) const {
    const std::string& text = addresses_[rank];
    absl::StatusOr<PeerAddress> address = PeerAddress::ParseUnix(text);
    return address.ok() ? *std::move(address) : PeerAddress::ParseTcp(text).value();
  }
  void set_address(int rank, std::string address) { addresses_[rank] = std::move(address); }
  const absl::Status& result(int rank) const { return results_[rank]; }

  // Checks that each rank is connected with each other one.
  void ExpectConnected() {
    Join();
    const int world_size = static_cast<int>(meetings_.size());
    for (int a = 0; a < world_size; ++a) {
      ASSERT_TRUE(results_[a].ok()) << results_[a];
      EXPECT_FALSE(connections_[a][a]);
      for (int b = 0; b < world_size; ++b) {
        if (a == b) continue;
        ASSERT_TRUE(SendAll(connections_[a][b], absl::StrCat(a, ">", b), SteadyNow() + kSoon).ok());
      }
    }
    for (int a = 0; a < world_size; ++a) {
      for (int b = 0; b < world_size; ++b) {
        if (a == b) continue;
        ASSERT_TRUE(WaitFor(connections_[b][a], POLLIN, SteadyNow() + kSoon).ok());
        std::string got;
        ReceiveSome(connections_[b][a], got);
        EXPECT_EQ(got, absl::StrCat(a, ">", b));
      }
    }
  }

 private:
  std::vector<std::unique_ptr<PeerMeeting>> meetings_;
  std::vector<std::string> addresses_;
  std::vector<std::thread> threads_;
  std::vector<absl::Status> results_;
  std::vector<std::vector<UniqueFd>> connections_;
};

// Calls a listener, and sends and receives what the test wants.
class TestCaller {
 public:
  explicit TestCaller(const PeerAddress& address) : line_{.is_unix = address.IsUnix()} {
    absl::StatusOr<UniqueFd> fd = address.StartToConnect();
    is_connected_ = fd.ok() && WaitFor(*fd, POLLOUT, SteadyNow() + kSoon).ok() &&
                    (line_.is_unix || FinishToConnect(*fd).ok());
    if (is_connected_) line_.fd = *std::move(fd);
  }
  bool is_connected() const { return is_connected_; }

  // Returns Unavailable if the listener has closed the connection.
  absl::StatusOr<std::string> Hear() {
    while (true) {
      EK_ASSIGN_OR_RETURN(std::optional<std::string> message, line_.Hear());
      if (message) return *std::move(message);
      EK_RETURN_IF_ERROR(WaitFor(line_.fd, POLLIN, SteadyNow() + kSoon));
    }
  }
  void Say(absl::string_view payload) {
    SayRaw(line_.is_unix ? std::string(payload) : Frame(payload));
  }
  // Sends the bytes without the header of a frame.
  void SayRaw(absl::string_view bytes) {
    SendAll(line_.fd, bytes, SteadyNow() + kSoon).IgnoreError();
  }
  PeerChallenge Challenge() { return PeerChallenge::Parse(Hear().value()).value(); }
  absl::Status Verdict() {
    EK_ASSIGN_OR_RETURN(const std::string message, Hear());
    EK_ASSIGN_OR_RETURN(const PeerVerdict verdict, PeerVerdict::Parse(message));
    return verdict.status;
  }
  // Waits until the listener closes the connection.
  void AwaitEnd() {
    while (Hear().ok()) {
    }
  }

 private:
  PeerLine line_;
  bool is_connected_ = false;
};

// Checks that a lack of descriptors that lasts ends the meeting of two ranks, on the one that
// accepts and on the one that calls.
inline void ExpectALastingLackEndsIt(const PeerMeetings::Make& make) {
  struct Case {
    int rank;
    std::string call;
  };
  for (const Case& each : {Case{0, "accept"}, Case{1, "socket"}}) {
    SCOPED_TRACE(each.rank);
    PeerMeetings meetings(make, 2);
    const TestCaller waits_for_rank_0(meetings.address(0));
    {
      const NoDescriptors none;
      meetings.Start(each.rank);
      meetings.Join();
    }
    const absl::Status& result = meetings.result(each.rank);
    EXPECT_TRUE(absl::IsResourceExhausted(result)) << result;
    EXPECT_NE(std::string(result.message()).find(each.call), std::string::npos) << result;
  }
}

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_TESTING_PEER_MEETINGS_H_
