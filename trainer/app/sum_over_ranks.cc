#include "evenkeel/trainer/app/sum_over_ranks.h"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstring>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "evenkeel/comm/collective.h"
#include "evenkeel/comm/control/control.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

struct Numbers {
  std::array<int64_t, 2> counts = {};
  double loss_sum = 0;
};

absl::StatusOr<std::vector<Numbers>> ExchangeNumbers(Communicator& comm, absl::string_view topic,
                                                     const Numbers& mine) {
  std::string bytes(sizeof(Numbers), '\0');
  std::memcpy(bytes.data(), &mine, sizeof(Numbers));
  EK_ASSIGN_OR_RETURN(const ControlChannel::Parts parts,
                      comm.control().Exchange(topic, bytes, comm.timeout()));
  std::vector<Numbers> all(parts.size());
  for (size_t rank = 0; rank < parts.size(); ++rank) {
    if (parts[rank].size() != sizeof(Numbers)) {
      return absl::InternalError(
          absl::StrCat(topic, ": ", parts[rank].size(), " bytes of rank ", rank));
    }
    std::memcpy(&all[rank], parts[rank].data(), sizeof(Numbers));
  }
  return all;
}

}  // namespace

absl::StatusOr<Evaluation> SumOverRanks(Communicator& comm, const Evaluation& mine) {
  if (!comm.device().is_cpu()) {
    EK_ASSIGN_OR_RETURN(
        const std::vector<Numbers> all,
        ExchangeNumbers(comm, "evaluation",
                        {.counts = {mine.predictions, mine.correct}, .loss_sum = mine.loss_sum}));
    Evaluation sum;
    for (const Numbers& rank : all) {
      sum += {.predictions = rank.counts[0], .correct = rank.counts[1], .loss_sum = rank.loss_sum};
    }
    return sum;
  }
  int64_t counts[] = {mine.predictions, mine.correct};
  double loss_sum = mine.loss_sum;
  EK_RETURN_IF_ERROR(comm.AllReduce(absl::MakeSpan(counts), ReduceOp::kSum));
  EK_RETURN_IF_ERROR(comm.AllReduce(absl::MakeSpan(&loss_sum, 1), ReduceOp::kSum));
  return Evaluation{.predictions = counts[0], .correct = counts[1], .loss_sum = loss_sum};
}

absl::StatusOr<std::vector<int64_t>> CountsOfRanks(Communicator& comm, int64_t mine) {
  std::vector<int64_t> counts(comm.world_size());
  if (comm.device().is_cpu()) {
    EK_RETURN_IF_ERROR(comm.AllGather(absl::MakeSpan(&mine, 1), absl::MakeSpan(counts)));
    return counts;
  }
  EK_ASSIGN_OR_RETURN(const std::vector<Numbers> all,
                      ExchangeNumbers(comm, "batches done", {.counts = {mine}}));
  std::ranges::transform(all, counts.begin(), [](const Numbers& rank) { return rank.counts[0]; });
  return counts;
}

}  // namespace evenkeel
