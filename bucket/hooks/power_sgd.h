// PowerSGD: each gradient matrix [m, n] travels as two thin ones, rank * (m + n) numbers in place
// of m * n, and what that leaves out is added to the next step's gradient.
//
//   PowerSgdOptions options{
//       .shapes = {MatrixOf({512, 256, 3, 3}), MatrixOf({512})}, .rank = 2, .start_step = 1000};
//   auto power = std::make_unique<PowerSgd>(options);
//   PowerSgd* state = power.get();                               // to save and load
//   EK_ASSIGN_OR_RETURN(auto ddp,
//                       DataParallel::Create(&comm, &params, buffers, {}, std::move(power)));
//
// Per step and matrix, with M = this rank's gradient plus its error, and Q equal on all ranks:
//   round 0: P = M Q, averaged; its columns orthonormalised, on each rank alike
//   round 1: Q = M^T P, averaged; the gradient is P Q^T, the same bits on all ranks
// and the error that stays on each rank is what of its own M was not sent, M - P (M^T P)^T. So over
// all ranks nothing is lost: what was sent and the errors add up to the gradients. The next step
// begins with this one's Q (warm start), which is one step of a power iteration.
//
// Vectors, matrices for which it would not pay, float64 and 16-bit gradients travel whole, in round
// 0.
//
// Uneven inputs: a rank that became exhausted takes part in both rounds and adds nothing. Its Q
//                stays equal to the others', its error waits until it has inputs again. Likewise a
//                parameter that got no gradient in a step: its error stays where it is, on ranks
//                where it got none.
// Not finite:    a matrix that is not finite on some rank becomes NaN on all, its errors and Q stay
//                as they were.
// Groups:        in another group it begins anew: Q from the seed, no errors, start_step counted
//                from there.
// State:         Q is equal on all ranks, errors are each rank's own. Save() and Load() on each
//                rank, between steps.
// Threads:       see reduction.h.
// Source:        Vogels, Karimireddy, Jaggi, "PowerSGD", NeurIPS 2019, algorithms 1 and 2.

#ifndef EVENKEEL_BUCKET_HOOKS_POWER_SGD_H_
#define EVENKEEL_BUCKET_HOOKS_POWER_SGD_H_

#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/hooks/low_rank.h"
#include "evenkeel/bucket/reduction.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/types.h"

namespace evenkeel {

struct MatrixShape {
  int64_t rows = 0;
  int64_t cols = 0;  // 0: no matrix, it travels whole.
};
// Returns the shape for a tensor with these dimensions: the first, and the product of the others.
MatrixShape MatrixOf(std::span<const int64_t> dimensions);
inline MatrixShape MatrixOf(std::initializer_list<int64_t> dimensions) {
  return MatrixOf(std::span<const int64_t>(dimensions.begin(), dimensions.size()));
}

// Equal on all ranks.
struct PowerSgdOptions {
  std::vector<MatrixShape> shapes;  // By parameter.
  int rank = 1;                     // At most; a matrix has no more than its smaller side.
  int64_t start_step = 0;  // So many reductions at first are plain: early gradients compress badly.
  double min_compression_rate = 2.0;  // A matrix is compressed if that saves this factor at least.
  bool use_error_feedback = true;     // Without it what is not sent is lost.
  bool warm_start = true;             // Without it each step draws a new Q.
  uint64_t seed = 0;
  double epsilon =
      1e-5;  // Directions smaller than this, relative to the largest, are left to the error.
};

class PowerSgd : public BucketReduction {
 public:
  explicit PowerSgd(PowerSgdOptions options);

  std::vector<Collective> CollectivesFor(const BucketInfo& bucket) const override;
  absl::StatusOr<RoundBuffers> BeginRound(const BucketInfo& bucket, int round,
                                          const ReductionStep& step) override;
  absl::StatusOr<GradFate> OnReduced(const BucketInfo& bucket, const ReductionStep& step) override;

  absl::Status OnStepEnd() override;

  bool HasThread() const override { return true; }
  UsedFlags used_flags() const override { return UsedFlags::kOwn; }
  absl::Status OnPlan(absl::Span<const BucketInfo> buckets) override;
  void OnGroup(Communicator& comm) override;
  int64_t CollectivesVersion() const override { return Compresses() ? 1 : 0; }

  // Reductions so far.
  int64_t steps() const { return steps_; }
  // Returns a hash of Q, which is equal on all ranks, for comparison.
  uint64_t SharedHash() const;
  // This rank's error of a parameter; empty if there is none yet.
  std::span<const float> error(int param) const { return slots_[param].error; }

  std::string Save() const;
  // InvalidArgument, and nothing has changed, for a state of other shapes or another rank.
  absl::Status Load(absl::string_view state);

 private:
  // The state of a parameter.
  struct Slot {
    uint64_t draws = 0;  // Random columns so far: each is another.
    std::vector<float> q;
    std::vector<float> error;
  };
  // A parameter's place in its bucket's messages.
  struct Place {
    int64_t count = 0;
    int64_t rank = 0;             // 0: it travels whole.
    internal::MatrixView matrix;  // In the bucket's data.
    int64_t first = 0;            // In round 0: the tensor, or P.
    int64_t second = 0;           // In round 1: Q.
    bool is_finite = true;        // P is, as the ranks have added it up.
    bool has_rest = false;        // `data` holds what this rank did not send.
  };
  struct Layout {
    std::vector<Place> places;
    int64_t first_count = 0;  // Flags included, which lie at its end.
    int64_t second_count = 0;
    bool has_matrices = false;
  };
  struct Bucket {
    Layout layout;
    std::vector<float> first, second;
  };

  bool Compresses() const { return steps_ >= options_.start_step; }
  int64_t RankOf(int param) const;  // 0: not compressed.
  Layout LayOut(const BucketInfo& bucket) const;
  void DrawColumn(int param, int64_t column);
  void SendFirst(const BucketInfo& bucket, Bucket& own, const ReductionStep& step);
  void SendSecond(const BucketInfo& bucket, Bucket& own, const ReductionStep& step);
  void Finish(const BucketInfo& bucket, Bucket& own, size_t index);

  const PowerSgdOptions options_;
  std::vector<Slot> slots_;  // By parameter.
  std::vector<Bucket> buckets_;
  int64_t steps_ = 0;
  bool has_group_ = false;
};

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_HOOKS_POWER_SGD_H_
