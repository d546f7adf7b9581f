// Exchanges a few numbers between ranks, between steps, over the control plane.
//
//   EK_ASSIGN_OR_RETURN(const Evaluation whole, SumOverRanks(comm, mine));
//   // by rank
//   EK_ASSIGN_OR_RETURN(const auto batches, ExchangeValues(comm, "batches done", done));
//
// Order:  all ranks make these calls together.
// Errors: those that end the group.

#ifndef EVENKEEL_TRAINER_APP_SUM_OVER_RANKS_H_
#define EVENKEEL_TRAINER_APP_SUM_OVER_RANKS_H_

#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/base/fields.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/control/control.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/trainer/models/evaluate.h"

namespace evenkeel {

// Returns the values of all ranks, by rank: numbers, or structs as comm/base/fields.h reads them.
template <typename T>
absl::StatusOr<std::vector<T>> ExchangeValues(Communicator& comm, absl::string_view topic,
                                              const T& mine) {
  const absl::StatusOr<ControlChannel::Parts> parts =
      comm.control().Exchange(topic, internal::ToBytes(mine), comm.timeout());
  if (!parts.ok()) {
    // A missed deadline is this rank's alone: the others would find that it has left, and name it.
    comm.Abort(parts.status());
    return parts.status();
  }
  std::vector<T> values;
  for (const std::string& part : *parts) {
    EK_ASSIGN_OR_RETURN(values.emplace_back(), internal::FromBytes<T>(part, topic));
  }
  return values;
}

inline absl::StatusOr<Evaluation> SumOverRanks(Communicator& comm, const Evaluation& mine) {
  EK_ASSIGN_OR_RETURN(const auto all, ExchangeValues(comm, "evaluation", mine));
  Evaluation sum;
  for (const Evaluation& rank : all) sum += rank;
  return sum;
}

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_APP_SUM_OVER_RANKS_H_
