#include "evenkeel/trainer/app/sum_over_ranks.h"

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
absl::StatusOr<Evaluation> SumOverRanks(Communicator& comm, const Evaluation& mine) {
  if (!comm.device().is_cpu()) {
    EK_ASSIGN_OR_RETURN(const auto all, ExchangeValues(comm, "evaluation", mine));
    Evaluation sum;
    for (const Evaluation& rank : all) sum += rank;
    return sum;
  }
  int64_t counts[] = {mine.predictions, mine.correct};
  double loss_sum = mine.loss_sum;
  EK_RETURN_IF_ERROR(comm.AllReduce(absl::MakeSpan(counts), ReduceOp::kSum));
  EK_RETURN_IF_ERROR(comm.AllReduce(absl::MakeSpan(&loss_sum, 1), ReduceOp::kSum));
  return Evaluation{.predictions = counts[0], .correct = counts[1], .loss_sum = loss_sum};
}

absl::StatusOr<std::vector<int64_t>> CountsOfRanks(Communicator& comm, int64_t mine) {
  if (!comm.device().is_cpu()) return ExchangeValues(comm, "batches done", mine);
  std::vector<int64_t> counts(comm.world_size());
  EK_RETURN_IF_ERROR(comm.AllGather(absl::MakeSpan(&mine, 1), absl::MakeSpan(counts)));
  return counts;
}

}  // namespace evenkeel
