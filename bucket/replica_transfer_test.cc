#include "evenkeel/bucket/replica_transfer.h"

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/divergence.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/failure_info.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/join/joinable.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::AllOf;
using testing::Each;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;

constexpr int kRanks = 4;

struct Replicas {
  std::vector<float> weights = {1, 2, 3}, bias = {4, 5};
};

struct End {
  absl::Status status;
  Replicas replicas;
  std::vector<std::string> repaired;
  bool is_torn = false;
};

// Rank 3 has no state. `damage` changes the replicas of a rank before they are compared, `on_way`
// after the move of an attempt, counted from 1; attempt `fails_at` fails.
std::vector<End> Transfer(std::vector<int> holders,
                          const std::function<void(int rank, Replicas&)>& damage,
                          const std::function<void(int rank, int attempt, Replicas&)>& on_way,
                          int fails_at = 0) {
  std::vector<End> ends(kRanks);
  const absl::Status status = RunTestRanks(kRanks, [&](Communicator& comm) -> absl::Status {
    const int rank = comm.rank();
    Replicas& own = ends[rank].replicas;
    if (rank == 3) own = {.weights = {0, 0, 0}, .bias = {0, 0}};
    damage(rank, own);
    EK_ASSIGN_OR_RETURN(Channel* const channel, comm.OpenChannel("state"));
    StateTransfer transfer{.source = 0, .steps = 7, .holders = holders};
    int attempts = 0;
    ends[rank].status = TransferReplicas(
        comm, transfer,
        {.tensors =
             [&] {
               return std::vector<NamedView>{{"weights", absl::MakeSpan(own.weights)},
                                             {"bias", absl::MakeSpan(own.bias)}};
             },
         .move = [&](int source) -> absl::Status {
           if (fails_at == ++attempts) return absl::UnavailableError("rank 0 is lost");
           EK_RETURN_IF_ERROR(channel->Broadcast(absl::MakeSpan(own.weights), source).Wait());
           EK_RETURN_IF_ERROR(channel->Broadcast(absl::MakeSpan(own.bias), source).Wait());
           on_way(rank, attempts, own);
           return absl::OkStatus();
         }});
    ends[rank].repaired = transfer.repaired;
    ends[rank].is_torn = transfer.is_torn;
    return absl::OkStatus();
  });
  EXPECT_TRUE(status.ok()) << status;
  return ends;
}

void Nothing(int /*rank*/, Replicas& /*replicas*/) {}
void NothingOnTheWay(int /*rank*/, int /*attempt*/, Replicas& /*replicas*/) {}

void ExpectRight(const std::vector<End>& ends) {
  for (const End& end : ends) {
    EXPECT_TRUE(end.status.ok()) << end.status;
    EXPECT_THAT(end.replicas.weights, ElementsAre(1, 2, 3));
    EXPECT_THAT(end.replicas.bias, ElementsAre(4, 5));
  }
}

void ExpectDataLoss(const std::vector<End>& ends, const std::string& text,
                    const std::vector<int>& ranks) {
  for (const End& end : ends) {
    EXPECT_TRUE(absl::IsDataLoss(end.status)) << end.status;
    EXPECT_THAT(end.status.message(), HasSubstr(text));
    EXPECT_EQ(FailureInfoOf(end.status)->ranks, ranks);
  }
}

TEST(ReplicaTransferTest, BringsTheStateToARankWithoutOne) {
  const std::vector<End> ends = Transfer({0, 1, 2}, Nothing, NothingOnTheWay);
  ExpectRight(ends);
  for (const End& end : ends) EXPECT_THAT(end.repaired, IsEmpty());
}

TEST(ReplicaTransferTest, OfThreeHoldersTheDamagedOneIsNamedAlsoTheSource) {
  for (const int damaged : {0, 1, 2}) {
    const std::vector<End> ends = Transfer(
        {0, 1, 2},
        [&](int rank, Replicas& own) {
          if (rank == damaged) own.weights[1] = 2.5;
        },
        NothingOnTheWay);
    ExpectRight(ends);
    for (const End& end : ends) {
      EXPECT_THAT(end.repaired,
                  ElementsAre(absl::StrCat("replicas differ after step 7: \"weights\" "
                                           "(tensor 0) differs on rank ",
                                           damaged)));
    }
  }
}

TEST(ReplicaTransferTest, TheSourceIsRightInAllTensors) {
  const std::vector<End> ends = Transfer(
      {0, 1, 2, 3},
      [](int rank, Replicas& own) {
        if (rank == 3) own = Replicas();
        if (rank == 0) own.weights[1] = 2.5;
        if (rank == 1) own.bias[0] = 0;
      },
      NothingOnTheWay);
  ExpectRight(ends);
}

TEST(ReplicaTransferTest, WithoutAMajorityNoneIsTaken) {
  const auto damage = [](int rank, Replicas& own) {
    if (rank == 1) own.bias[1] = 6;
  };
  ExpectDataLoss(Transfer({0, 1}, damage, NothingOnTheWay),
                 "replicas differ after step 7: \"bias\" (tensor 1): ranks 0 and 1 differ: "
                 "no rank is known to be right; load a checkpoint",
                 {0, 1});
}

TEST(ReplicaTransferTest, DamageOnTheWayIsSentAgain) {
  const std::vector<End> ends = Transfer({1, 2}, Nothing, [](int rank, int attempt, Replicas& own) {
    if (rank == 3 && attempt < 3) own.bias[1] = -5;
  });
  ExpectRight(ends);
  for (const End& end : ends) {
    EXPECT_EQ(end.repaired.size(), 2);
    EXPECT_THAT(end.repaired,
                Each(AllOf(HasSubstr("the state that rank 0 sent has not arrived unchanged"),
                           HasSubstr("\"bias\" (tensor 1) differs on rank 3"))));
  }
}

TEST(ReplicaTransferTest, DamageOnTheWayThatStaysIsAnError) {
  ExpectDataLoss(Transfer({0}, Nothing,
                          [](int rank, int /*attempt*/, Replicas& own) {
                            if (rank == 2) own.weights[0] = 8;
                          }),
                 "differs on rank 2, also not when it was sent again", {2});
}

// The next source must be a rank that still has the state.
TEST(ReplicaTransferTest, AHolderThatReceivedDamageIsTornIfTheSourceIsLostThen) {
  const std::vector<End> ends = Transfer(
      {0, 1, 2}, Nothing,
      [](int rank, int /*attempt*/, Replicas& own) {
        if (rank == 1) own.weights[2] = 30;
      },
      /*fails_at=*/2);
  for (int rank = 0; rank < kRanks; ++rank) {
    EXPECT_TRUE(absl::IsUnavailable(ends[rank].status)) << ends[rank].status;
    EXPECT_EQ(ends[rank].is_torn, rank == 1) << rank;
  }
}

}  // namespace
}  // namespace evenkeel
