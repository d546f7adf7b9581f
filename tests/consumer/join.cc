// Counts inputs over three ranks of which one has none, one has one, and one has three: the part of
// a training program that a user writes when RunJoined() does the rest.

#include "evenkeel/join/join.h"

#include <cstdint>
#include <cstdio>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/local/local.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/join/joinable.h"

namespace {

using evenkeel::CallOptions;
using evenkeel::Channel;
using evenkeel::Communicator;
using evenkeel::Joinable;
using evenkeel::JoinHook;
using evenkeel::JoinOptions;
using evenkeel::JoinScope;
using evenkeel::ReduceOp;
using evenkeel::StepAnswer;

// Adds one over the ranks that have an input.
class Counter : public Joinable {
 public:
  static absl::StatusOr<std::unique_ptr<Counter>> Create(Communicator* comm) {
    auto counter = std::unique_ptr<Counter>(new Counter(comm));
    EK_ASSIGN_OR_RETURN(counter->channel_, comm->OpenChannel(counter->join_name()));
    return counter;
  }

  absl::Status Count() {
    EK_RETURN_IF_ERROR(Notify().status());
    return Add(1, {});
  }

  int64_t total() const { return total_; }

  absl::StatusOr<std::unique_ptr<JoinHook>> MakeJoinHook(const JoinOptions&) override {
    return std::make_unique<Shadow>(this);
  }

 private:
  struct Shadow : JoinHook {
    explicit Shadow(Counter* owner) : counter(owner) {}
    absl::Status MainHook(const StepAnswer&) override {
      return counter->Add(0, {.contributes = false});
    }
    Counter* const counter;
  };

  explicit Counter(Communicator* comm) : Joinable(comm, "counter") {}

  absl::Status Add(int64_t mine, const CallOptions& options) {
    std::vector<int64_t> sum = {mine};
    EK_RETURN_IF_ERROR(channel_->AllReduce(absl::MakeSpan(sum), ReduceOp::kSum, options).Wait());
    total_ += sum[0];
    return absl::OkStatus();
  }

  Channel* channel_ = nullptr;
  int64_t total_ = 0;
};

absl::Status CountInputs(Communicator& comm) {
  const std::vector<int> inputs = {1, 3, 0};  // by rank
  EK_ASSIGN_OR_RETURN(std::unique_ptr<Counter> counter, Counter::Create(&comm));
  EK_RETURN_IF_ERROR(
      evenkeel::RunJoined({counter.get()}, JoinOptions(), [&](JoinScope&) -> absl::Status {
        for (int i = 0; i < inputs[comm.rank()]; ++i) EK_RETURN_IF_ERROR(counter->Count());
        return absl::OkStatus();
      }));
  if (counter->total() != 4) return absl::InternalError("some inputs were not counted");
  return absl::OkStatus();
}

}  // namespace

int main() {
  absl::Status status = evenkeel::RunRanks(3, CountInputs);
  if (!status.ok()) {
    std::fprintf(stderr, "%s\n", status.ToString().c_str());
    return 1;
  }
  std::printf("3 ranks counted 4 inputs\n");
  return 0;
}
