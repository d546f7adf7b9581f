// For the tests of recovery: a rank's model with a DataParallel and an optimizer, whose steps can
//                            end anywhere.
//
//   Replica<> mine;
//   EK_RETURN_IF_ERROR(mine.Create(*comm, Sgd{.momentum = 0.9}));
//   status = mine.Step(
//       step, [&](Point point) { return point == Point::kReduced ? Lost() : absl::OkStatus(); });
//   EK_ASSIGN_OR_RETURN(Recovered recovered, Recover(mine.joinables(), *comm));
//
// Threads: one per rank; OnEach() makes them.

#ifndef EVENKEEL_TESTS_RECOVERY_REPLICA_H_
#define EVENKEEL_TESTS_RECOVERY_REPLICA_H_

#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/testing/toy_model.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/same_sums.h"
#include "evenkeel/join/joinable.h"
#include "evenkeel/join/steps/step_control.h"
#include "evenkeel/zero_optim/lost_shard.h"
#include "evenkeel/zero_optim/optimizer.h"
#include "evenkeel/zero_optim/update_rule.h"
#include "gtest/gtest.h"

namespace evenkeel {

using Group = std::vector<std::unique_ptr<Communicator>>;

inline const std::vector<int> kSizes = {3, 7, 1, 5, 2};

// Where in a step a rank stops.
enum class Point { kNowhere, kForward, kBackward, kReduced, kStepped };

// One rank's model and what trains it.
template <typename Placement = Replicated>
struct Replica {
  ToyModel model{kSizes};
  std::unique_ptr<DataParallel> ddp;
  std::unique_ptr<Optimizer> optimizer;

  absl::Status Create(Communicator& comm, const UpdateRule& rule,
                      LostShard lost_shard = LostShard::kRefuse) {
    EK_ASSIGN_OR_RETURN(ddp, DataParallel::Create(&comm, &model.params(), model.buffers(),
                                                  {.reducer = {.caps = {Bytes{8}, Bytes{24}}}}));
    EK_ASSIGN_OR_RETURN(
        optimizer,
        Optimizer::Create(*ddp, rule, {.placement = Placement{}, .lost_shard = lost_shard}));
    return absl::OkStatus();
  }
  void Destroy() {
    optimizer.reset();
    ddp.reset();
  }
  std::vector<Joinable*> joinables() { return {optimizer.get(), ddp.get()}; }

  // Calls `at` at the points of the step; an error of it ends the step there.
  absl::Status Step(int step, const std::function<absl::Status(Point)>& at) {
    const int rank = ddp->communicator().rank();
    model.params().ClearGradients();
    EK_RETURN_IF_ERROR(optimizer->SetLearningRate(0.1 / (1 + step)));
    EK_RETURN_IF_ERROR(ddp->BeginStep());
    model.Forward(rank, step);
    EK_RETURN_IF_ERROR(at(Point::kForward));
    int announced = 0;
    EK_RETURN_IF_ERROR(model.Backward(rank, step, [&](int param) -> absl::Status {
      if (announced++ == 2) EK_RETURN_IF_ERROR(at(Point::kBackward));
      return ddp->GradientReady(param);
    }));
    EK_RETURN_IF_ERROR(ddp->FinishStep());
    EK_RETURN_IF_ERROR(at(Point::kReduced));
    EK_RETURN_IF_ERROR(optimizer->Step());
    return at(Point::kStepped);
  }
  absl::Status Steps(int first, int end) {
    for (int step = first; step < end; ++step) {
      EK_RETURN_IF_ERROR(Step(step, [](Point) { return absl::OkStatus(); }));
    }
    return absl::OkStatus();
  }
};

// Against a training that lost no rank, whose groups may add in another order.
inline testing::Matcher<std::vector<std::vector<float>>> SameValues(
    const std::vector<std::vector<float>>& expected) {
  return SameSums(expected, /*bound=*/2e-5f);
}

inline void OnEach(int ranks, const std::function<absl::Status(int rank)>& body) {
  std::vector<absl::Status> results(ranks);
  std::vector<std::thread> threads;
  for (int rank = 0; rank < ranks; ++rank)
    threads.emplace_back([&, rank] { results[rank] = body(rank); });
  for (std::thread& thread : threads) thread.join();
  for (int rank = 0; rank < ranks; ++rank)
    EXPECT_TRUE(results[rank].ok()) << rank << ": " << results[rank];
}

// Returns Lost() when all ranks have begun the step of this one, and so have ended the one before
// it.
inline absl::Status LostWithinTheStep(Communicator& comm) {
  EK_RETURN_IF_ERROR(StepControl::Of(comm).current()->Wait().status());
  return absl::CancelledError("this rank is lost");
}
inline absl::Status Lost() { return absl::CancelledError("this rank is lost"); }

}  // namespace evenkeel

#endif  // EVENKEEL_TESTS_RECOVERY_REPLICA_H_
