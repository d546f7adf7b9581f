// Blocks of training steps in which some ranks have fewer inputs, timed on this rank.
//
//   EK_ASSIGN_OR_RETURN(auto training, SkewedTraining::Create(&comm, {.way = JoinWay::kShadow,
//                                                                     .skew = Skew::kTen}));
//   EK_ASSIGN_OR_RETURN(BlockTimes times, training->RunBlock());        // on all ranks
//
// The model computes nothing: forward and backward wait as long as an accelerator would compute,
// and announce each gradient as a real backward does. So several ranks share a core without holding
// each other up, and what is seen is communication.
//
// Threads: as the communicator.
// Errors:  those of the libraries. InvalidArgument for ranks with fewer inputs where nobody joins.

#ifndef EVENKEEL_TESTS_SKEW_SKEWED_TRAINING_H_
#define EVENKEEL_TESTS_SKEW_SKEWED_TRAINING_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "evenkeel/bucket/data_parallel.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/zero_optim/optimizer.h"

namespace evenkeel {

enum class JoinWay {
  kNone,      // No RunJoined().
  kDisabled,  // RunJoined() that is switched off.
  kShadow,    // Exhausted ranks follow.
};

enum class Skew {
  kEven,
  kTen,          // The lower half of the ranks has ten steps fewer.
  kEmptyEighth,  // Ranks 0, 8, 16, ... have no inputs at all.
};

struct SkewSetting {
  JoinWay way = JoinWay::kNone;
  Skew skew = Skew::kEven;
  // For scale, what other systems get where rank 0 is empty: the first step, whose order is
  // recorded, announces gradients in the order of registration, so that the bucket which is first
  // to go is last to be ready.
  bool registration_order = false;
  int steps = 20;  // Per block, on ranks that have all.
  absl::Duration forward = absl::Milliseconds(10);
  absl::Duration backward = absl::Milliseconds(20);
  int layers = 12;
  int64_t layer_elements = 65536;  // float32.

  int StepsOf(int rank, int world) const;
};

struct BlockTimes {
  std::vector<double> steps,
      backwards;  // Seconds of each, on this rank: the latter from first gradient to last bucket.
  double block = 0;  // The whole block, with exhausted ranks' part.
};

class SkewedTraining {
 public:
  // All ranks together.
  static absl::StatusOr<std::unique_ptr<SkewedTraining>> Create(Communicator* comm,
                                                                const SkewSetting& setting);
  SkewedTraining(Communicator* comm, const SkewSetting& setting);

  absl::StatusOr<BlockTimes> RunBlock();

  // Whether buckets come in the order of backward, which is what lets them overlap with it.
  bool BucketsFollowBackward() const;

 private:
  absl::Status Loop(BlockTimes& times);
  absl::Status Step(BlockTimes& times);

  Communicator* const comm_;
  const SkewSetting setting_;
  std::vector<std::vector<float>> values_, gradients_;
  ParameterSet params_;
  std::unique_ptr<DataParallel> ddp_;
  std::unique_ptr<Optimizer> optimizer_;
  bool is_first_step_ = true;
};

}  // namespace evenkeel

#endif  // EVENKEEL_TESTS_SKEW_SKEWED_TRAINING_H_
