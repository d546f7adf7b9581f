// All-reduce of float32 gradients in 8 bits: a quarter of the bytes, at any number of ranks, and
// what rounding leaves out is added to the next step's gradient.
//
//   EK_ASSIGN_OR_RETURN(auto ddp, DataParallel::Create(&comm, &params, buffers, {},
//                                                      std::make_unique<QuantizedAllReduce>()));
//
// Sums of 8-bit numbers do not fit into 8 bits, so no all-reduce is used. A bucket has one piece
// per rank:
//   round 0 (all_to_all): each rank rounds its gradient plus its error, with a scale for each 256
//                         elements, and sends each piece to its owner, which adds in float32
//   round 1 (all_gather): the owners round the sums, plus their own rounding errors, and send them
//                         to all ranks
// Over all ranks and steps nothing is lost: what was applied and the errors add up to the
// gradients.
//
// 16-bit and float64 gradients are all-reduced as they are.
//
// Uneven inputs: a rank that became exhausted adds nothing, but goes on owning its piece; its own
//                errors wait until it has inputs again, as those of a parameter do that gets no
//                gradient on a rank.
// Not finite:    256 elements that hold a value which is not finite are infinite or NaN on all
//                ranks; errors stay as they were there.
// Groups:        in another group it begins without errors.
// State:         errors are each rank's own. Save() and Load() on each rank, between steps.
// Threads:       see reduction.h.
// Source:        the exchange of 1-bit Adam (Tang et al., ICML 2021), with 8 bits; error feedback
//                as in Seide et al., "1-bit stochastic gradient descent", Interspeech 2014.

#ifndef EVENKEEL_BUCKET_HOOKS_QUANTIZED_ALL_REDUCE_H_
#define EVENKEEL_BUCKET_HOOKS_QUANTIZED_ALL_REDUCE_H_

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/reduction.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/communicator.h"

namespace evenkeel {

class QuantizedAllReduce : public BucketReduction {
 public:
  std::vector<Collective> CollectivesFor(const BucketInfo& bucket) const override;
  absl::StatusOr<RoundBuffers> BeginRound(const BucketInfo& bucket, int round,
                                          const ReductionStep& step) override;
  absl::StatusOr<GradFate> OnReduced(const BucketInfo& bucket, const ReductionStep& step) override;

  bool HasThread() const override { return true; }
  UsedFlags used_flags() const override { return UsedFlags::kOwn; }
  absl::Status OnPlan(absl::Span<const BucketInfo> buckets) override;
  void OnGroup(Communicator& comm) override;

  // By parameter, what this rank's part of the gradients still owes; those without are missing.
  std::map<int, std::vector<float>> Errors() const;
  std::string Save() const;
  absl::Status Load(absl::string_view state);

 private:
  // The position of a parameter in its bucket.
  struct Range {
    int param = 0;
    int64_t begin = 0;
    int64_t end = 0;
    bool is_used_here = false;
  };
  struct Bucket {
    std::vector<Range> ranges;
    int64_t piece = 0;  // Elements that each rank owns: a multiple of 256.
    std::vector<std::byte> sent, received, sum_sent, sums;
    std::vector<float> piece_error, next_piece_error;
  };

  // A message: scales, elements, and in round 0 a byte per parameter that says whether this rank
  //            has a gradient of it.
  static int64_t MessageBytes(int64_t piece, int64_t flags);
  int64_t PieceOf(const BucketInfo& bucket) const;
  void SendPieces(const BucketInfo& bucket, Bucket& own, const ReductionStep& step);
  void SendSum(const BucketInfo& bucket, Bucket& own);

  int rank_ = 0;
  int world_size_ = 1;
  bool has_group_ = false;
  std::map<int, std::vector<float>> errors_;  // By parameter; empty until it has had a gradient.
  std::vector<Bucket> buckets_;
};

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_HOOKS_QUANTIZED_ALL_REDUCE_H_
