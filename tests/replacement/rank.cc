// A rank of replacement_test, as a process: replacement_rank STEPS PAUSE_US. Prints "step 12" as it
// begins a step, and "done HASH" with a hash of parameters and optimizer state. Variables:
//   REPLACEMENT_SIZE      the size of a parameter
//   REPLACEMENT_SHARDED   1: the optimizer's state is split over the ranks
//   REPLACEMENT_WAIT_S    RecoveryOptions::wait_for_replacement
//   REPLACEMENT_STEP      1: a newcomer makes a step before it enters
//   REPLACEMENT_TIMES     1: place 0 prints "times NS", the median of steps 10 to 110 in each group

#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/divergence.h"
#include "evenkeel/bucket/testing/toy_model.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/environment.h"
#include "evenkeel/comm/factory.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/tested_group.h"
#include "evenkeel/join/recovery.h"
#include "evenkeel/zero_optim/optimizer.h"
#include "evenkeel/zero_optim/update_rule.h"

namespace evenkeel {
namespace {

int Variable(const char* name, int otherwise) {
  const char* const text = std::getenv(name);
  int value = otherwise;
  return text != nullptr && absl::SimpleAtoi(text, &value) ? value : otherwise;
}

struct Training {
  ToyModel model{{3, 70, 1, Variable("REPLACEMENT_SIZE", 500), 20}};
  std::unique_ptr<DataParallel> ddp;
  std::unique_ptr<Optimizer> optimizer;

  absl::Status Step(int place, int64_t step) {
    model.params().ClearGradients();
    EK_RETURN_IF_ERROR(optimizer->SetLearningRate(0.1 / (1.0 + 0.01 * static_cast<double>(step))));
    EK_RETURN_IF_ERROR(ddp->BeginStep());
    EK_RETURN_IF_ERROR(model.Backward(place, static_cast<int>(step),
                                      [&](int param) { return ddp->GradientReady(param); }));
    EK_RETURN_IF_ERROR(ddp->FinishStep());
    return optimizer->Step();
  }
  uint64_t Hash() {
    uint64_t hash = 0;
    for (const std::vector<float>& values : model.values()) {
      for (const float value : values)
        hash = StableHash(hash,
                          absl::string_view(reinterpret_cast<const char*>(&value), sizeof(value)));
    }
    for (const auto& [index, parameter] : optimizer->state().params) {
      hash = StableHash(StableHash(hash, index), parameter.step);
      for (const auto& [name, tensor] : parameter.tensors) {
        hash = StableHash(
            hash, absl::string_view(reinterpret_cast<const char*>(tensor.data()), tensor.bytes()));
      }
    }
    return hash;
  }
};

class StepTimes {
 public:
  explicit StepTimes(bool prints) : prints_(prints) {}

  static bool are_taken() { return Variable("REPLACEMENT_TIMES", 0) == 1; }
  void Begin() { began_ = absl::Now(); }
  void End() {
    if (!are_taken() || !prints_ || ++steps_ > 110) return;
    if (steps_ > 10) times_.push_back(absl::ToInt64Nanoseconds(absl::Now() - began_));
    if (steps_ < 110) return;
    std::ranges::nth_element(times_, times_.begin() + 50);
    std::cout << absl::StrCat("times ", times_[50], "\n") << std::flush;
  }

 private:
  const bool prints_;
  int steps_ = 0;
  absl::Time began_;
  std::vector<int64_t> times_;
};

absl::Status Main(int64_t steps, absl::Duration pause) {
  EK_ASSIGN_OR_RETURN(const Environment environment, ReadEnvironment());
  std::cout << absl::StrCat("process ", getpid(), " newcomer ", environment.newcomer, "\n")
            << std::flush;
  EK_ASSIGN_OR_RETURN(std::unique_ptr<Communicator> comm,
                      CreateCommunicator(environment, {.backend = BackendOfProcesses()}));
  Training training;
  EK_ASSIGN_OR_RETURN(training.ddp,
                      DataParallel::Create(comm.get(), &training.model.params(), {},
                                           {.reducer = {.caps = {Bytes{64}, Bytes{1024}}}}));
  EK_ASSIGN_OR_RETURN(
      training.optimizer,
      Optimizer::Create(*training.ddp, AdamW{.weight_decay = 0.01},
                        {.placement = Variable("REPLACEMENT_SHARDED", 0) == 1 ? Placement(Slices{})
                                                                              : Replicated{}}));
  const std::vector<Joinable*> joinables = {training.ddp.get(), training.optimizer.get()};
  const RecoveryOptions options = {
      .timeout = absl::Seconds(30),
      .wait_for_replacement = absl::Seconds(Variable("REPLACEMENT_WAIT_S", 20))};
  int64_t step = 0;
  if (comm->waiting()) {
    if (Variable("REPLACEMENT_STEP", 0) == 1) return training.Step(comm->rank(), 0);
    std::cout << "ready\n" << std::flush;
    EK_ASSIGN_OR_RETURN(Recovered entered, Enter(joinables, *comm, options));
    comm = std::move(entered.comm);
    step = entered.steps;
    std::cout << "entered\n" << std::flush;
  }
  while (true) {
    absl::Status status;
    StepTimes times(comm->members()[comm->rank()] == 0);
    for (; step < steps && status.ok(); step += status.ok()) {
      if (!times.are_taken()) std::cout << absl::StrCat("step ", step, "\n") << std::flush;
      absl::SleepFor(pause);
      times.Begin();
      status = training.Step(comm->members()[comm->rank()], step);
      times.End();
    }
    if (status.ok()) status = comm->Finalize(absl::Seconds(20));
    if (status.ok()) break;
    RecoveryOptions its = options;
    its.why = status;
    EK_ASSIGN_OR_RETURN(Recovered recovered, Recover(joinables, *comm, its));
    if (recovered.lost.empty()) return status;
    comm = std::move(recovered.comm);
    step = recovered.steps;
    std::cout << absl::StrCat("recovered ", step, " of ", comm->world_size(), " with ",
                              recovered.entered.size(), "\n")
              << std::flush;
  }
  std::cout << absl::StrCat("done ", training.Hash(), "\n") << std::flush;
  return absl::OkStatus();
}

}  // namespace
}  // namespace evenkeel

int main(int argc, char** argv) {
  int64_t steps = 0, pause = 0;
  absl::Status status =
      argc == 3 && absl::SimpleAtoi(argv[1], &steps) && absl::SimpleAtoi(argv[2], &pause)
          ? evenkeel::Main(steps, absl::Microseconds(pause))
          : absl::InvalidArgumentError("usage: replacement_rank STEPS PAUSE_US");
  if (!status.ok()) std::cerr << status << "\n";
  return status.ok() ? 0 : 1;
}
