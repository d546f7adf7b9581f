// Gradients travel as 16-bit floats: half the bytes of any other reduction's float32, a quarter of
// its float64.
//
//   auto half = std::make_unique<CompressedReduction>(DType::kBFloat16);  // all-reduce
//   EK_ASSIGN_OR_RETURN(auto ddp,
//                       DataParallel::Create(&comm, &params, buffers, {}, std::move(half)));
//
//   CompressedReduction(DType::kFloat16, std::make_unique<PowerSgd>(options));  // both
//
// The input of each round of the inner reduction is multiplied by its scale (one over the divisor),
// then rounded to 16 bits; the transport adds up in 16 bits or better, and the result is widened
// into the inner reduction's own buffers. Rounds of other types than float32 and float64 pass
// through unchanged.
//
// Rounding: to nearest even, per rank once before the sum. Scaled first, a sum of float16 overflows
//           only if the average itself would. A value beyond float16's 65504 becomes infinity, on
//           all ranks, and is seen by whatever looks for finite gradients; one below 6e-8 becomes
//           zero. bfloat16 has float32's range and 8 bits.
// Devices:  conversions are put on the reduction's stream (reduction.h), a launch per round and
//           direction, and one for the used flags. The same bits as on the CPU, but float64 comes
//           to 16 bits by way of float32.
// Threads:  see reduction.h.
// Errors:   InvalidArgument when the reducer is made if `wire` is not a 16-bit float.

#ifndef EVENKEEL_BUCKET_HOOKS_COMPRESSED_REDUCTION_H_
#define EVENKEEL_BUCKET_HOOKS_COMPRESSED_REDUCTION_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/reduction.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/device/runtime.h"
#include "evenkeel/comm/memory.h"
#include "evenkeel/comm/types.h"

namespace evenkeel {

class CompressedReduction : public BucketReduction {
 public:
  // `inner` null means all-reduce.
  explicit CompressedReduction(DType wire, std::unique_ptr<BucketReduction> inner = nullptr);

  std::vector<Collective> CollectivesFor(const BucketInfo& bucket) const override;
  absl::StatusOr<RoundBuffers> BeginRound(const BucketInfo& bucket, int round,
                                          const ReductionStep& step) override;
  absl::StatusOr<GradFate> OnReduced(const BucketInfo& bucket, const ReductionStep& step) override;
  absl::Status OnStepBegin() override { return inner_->OnStepBegin(); }
  absl::Status OnStepEnd() override { return inner_->OnStepEnd(); }
  void PrepareStep() override { inner_->PrepareStep(); }
  absl::Status WaitForValues() override { return inner_->WaitForValues(); }

  bool HasThread() const override { return true; }
  UsedFlags used_flags() const override { return inner_->used_flags(); }
  int64_t CountMultiple() const override { return inner_->CountMultiple(); }
  void OnGroup(Communicator& comm) override {
    runtime_ = comm.runtime();
    inner_->OnGroup(comm);
  }
  int64_t CollectivesVersion() const override { return inner_->CollectivesVersion(); }
  absl::Status OnPlan(absl::Span<const BucketInfo> buckets) override;
  std::string StepMessage() override { return inner_->StepMessage(); }
  absl::Status OnShadow(absl::string_view message) override { return inner_->OnShadow(message); }

 private:
  struct Round {
    std::vector<std::byte> memory;  // On the CPU,
    std::vector<Memory> on_device;  // or the last of these: those before may be in use.
    std::vector<std::pair<TensorView, TensorView>>
        arriving;  // 16 bits, and where it is widened to.
  };

  // Widens what the rounds before `round` have brought.
  absl::Status Receive(const BucketInfo& bucket, int round, StreamRef stream);
  absl::StatusOr<std::byte*> Reserve(Round& round, int64_t bytes, Device device);
  absl::Status Narrow(const TensorView& from, const TensorView& half, double scale,
                      StreamRef stream);

  const DType wire_;
  const std::unique_ptr<BucketReduction> inner_;
  DeviceRuntime* runtime_ = nullptr;        // Null on the CPU.
  std::vector<std::vector<Round>> rounds_;  // By bucket and round.
};

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_HOOKS_COMPRESSED_REDUCTION_H_
