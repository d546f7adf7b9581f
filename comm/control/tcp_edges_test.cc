#include "evenkeel/comm/control/tcp_edges.h"

#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/synchronization/mutex.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/comm/control/exchange_tree.h"
#include "evenkeel/comm/control/messages.h"
#include "evenkeel/comm/control/tree_link.h"
#include "evenkeel/comm/net/greet.h"
#include "evenkeel/comm/net/handshake.h"
#include "evenkeel/comm/net/socket.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel::internal {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::UnorderedElementsAre;

constexpr absl::Duration kSoon =
    absl::Seconds(20);  // For what takes milliseconds when the machine is free.
constexpr TreeShape kShape{.world_size = 6,
                           .fanout = 2};  // Rank 0 has the children 2 and 3, rank 1 has 4 and 5.

// The edges of one rank, and what has come over them.
class End {
 public:
  explicit End(int rank, absl::Duration timeout = kSoon)
      : rank_(rank),
        edges_(CreateTcpEdges({.job = {"job", "secret"},
                               .group = "world",
                               .rank = rank,
                               .shape = kShape,
                               .host = "127.0.0.1",
                               .timeout = timeout})
                   .value()) {
    const auto receive = [this](int from, const ExchangeId& id) {
      absl::MutexLock lock(&mutex_);
      received_.push_back(absl::StrCat(from, ":", id.topic));
    };
    edges_->Start(
        [receive](int child, ToHub message) {
          receive(child, std::get<to_hub::Exchange>(message).id);
        },
        [receive, parent = kShape.ParentOf(rank)](ToRank message) {
          receive(parent, std::get<to_rank::Exchanged>(message).id);
        },
        [this](int neighbour, const absl::Status& why) {
          absl::MutexLock lock(&mutex_);
          lost_.push_back(absl::StrCat(neighbour, ": ", why.message()));
        });
  }

  TreeEdges& operator*() { return *edges_; }
  TreeEdges* operator->() { return edges_.get(); }
  void Send(int to, const std::string& topic) {
    if (to == kShape.ParentOf(rank_)) {
      edges_->SendToParent(to_hub::Exchange{.id = {topic}});
    } else {
      edges_->SendToChildren({to}, to_rank::Exchanged{.id = {topic}});
    }
  }
  std::vector<std::string> WaitFor(size_t count) {
    absl::MutexLock lock(&mutex_);
    const auto enough = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
      return received_.size() >= count;
    };
    mutex_.AwaitWithTimeout(absl::Condition(&enough), kSoon);
    return received_;
  }
  std::vector<std::string> WaitForLoss() {
    absl::MutexLock lock(&mutex_);
    const auto lost = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return !lost_.empty(); };
    mutex_.AwaitWithTimeout(absl::Condition(&lost), kSoon);
    return lost_;
  }
  std::vector<std::string> lost() {
    absl::MutexLock lock(&mutex_);
    return lost_;
  }

 private:
  const int rank_;
  absl::Mutex mutex_;
  std::vector<std::string> received_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::string> lost_ ABSL_GUARDED_BY(mutex_);
  const std::unique_ptr<TreeEdges> edges_;
};

absl::Status Knock(const std::string& address, Hello hello, const std::string& secret = "secret") {
  const auto find = [&]() -> absl::StatusOr<std::vector<HostPort>> {
    return std::vector<HostPort>{HostPort::Parse(address).value()};
  };
  hello.kind = hello.group.empty() ? Hello::Kind::kStore : Hello::Kind::kControl;
  return Greet(find, hello, {"job", secret}, absl::Now() + kSoon).status();
}

TEST(TcpEdgesTest, CarryMessagesBothWaysInOrder) {
  End parent(0), left(2), right(3);
  // Before anybody is connected.
  parent.Send(2, "early");
  left.Send(0, "early");
  left->AttachParent(parent->Address());
  right->AttachParent(parent->Address());
  right.Send(0, "right");
  left.Send(0, "late");
  EXPECT_THAT(parent.WaitFor(3), UnorderedElementsAre("2:early", "2:late", "3:right"));
  parent.Send(3, "down");
  parent.Send(2, "down");
  EXPECT_THAT(left.WaitFor(2), ElementsAre("0:early", "0:down"));
  EXPECT_THAT(right.WaitFor(1), ElementsAre("0:down"));
  EXPECT_EQ(parent->Counters().messages_sent, 3);
  EXPECT_EQ(parent->Counters().messages_received, 3);
  EXPECT_EQ(left->Counters().messages_sent, 2);
  EXPECT_EQ(left->Counters().bytes_received, right->Counters().bytes_received * 2 + 1);
  EXPECT_GT(left->Counters().cpu_time, absl::ZeroDuration());
}

TEST(TcpEdgesTest, AParentLetsItsChildrenInAndNobodyElse) {
  End parent(0), child(2);
  child->AttachParent(parent->Address());
  child.Send(0, "here");
  parent.WaitFor(1);
  const Hello good{.group = "world", .rank = 3, .world_size = 6};
  EXPECT_TRUE(absl::IsPermissionDenied(Knock(parent->Address(), good, "another secret")));
  for (const int rank : {0, 1, 2, 4}) {  // Rank 2 has come already.
    Hello wrong = good;
    wrong.rank = rank;
    EXPECT_TRUE(absl::IsInvalidArgument(Knock(parent->Address(), wrong))) << rank;
  }
  Hello wrong = good;
  wrong.group = "another";
  EXPECT_TRUE(absl::IsInvalidArgument(Knock(parent->Address(), wrong)));
  wrong = good;
  wrong.world_size = 7;
  EXPECT_TRUE(absl::IsInvalidArgument(Knock(parent->Address(), wrong)));
  wrong = good;
  wrong.group.clear();
  const absl::Status store = Knock(parent->Address(), wrong);
  EXPECT_THAT(std::string(store.message()), HasSubstr("this server has no store"));
  EXPECT_TRUE(Knock(parent->Address(), good).ok());
}

TEST(TcpEdgesTest, ALostParentIsReported) {
  End child(2);
  {
    End parent(0);
    child->AttachParent(parent->Address());
    child.Send(0, "here");
    EXPECT_THAT(parent.WaitFor(1), ElementsAre("2:here"));
    parent.Send(2, "last words");
  }
  EXPECT_THAT(child.WaitForLoss(), ElementsAre("0: rank 0 is gone, or the network is cut"));
  EXPECT_THAT(child.WaitFor(1), ElementsAre("0:last words"));
}

TEST(TcpEdgesTest, AParentThatIsNotThereIsReported) {
  End child(2, absl::Milliseconds(50));
  child->AttachParent("127.0.0.1:1");
  ASSERT_EQ(child.WaitForLoss().size(), 1u);
  EXPECT_THAT(child.lost()[0], HasSubstr("127.0.0.1:1"));
}

TEST(TcpEdgesTest, WhoStopsHearsOfNoLoss) {
  End parent(0), child(2);
  child->AttachParent(parent->Address());
  child.Send(0, "here");
  parent.WaitFor(1);
  child.Send(0, "last words");
  child->Stop();
  EXPECT_THAT(parent.WaitFor(2), ElementsAre("2:here", "2:last words"));
  parent->Stop();
  EXPECT_TRUE(child.lost().empty());
  EXPECT_TRUE(parent.lost().empty());
}

}  // namespace
}  // namespace evenkeel::internal
