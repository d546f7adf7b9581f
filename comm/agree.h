// Makes all ranks of a group agree, over the control plane: on whether all can continue, and on
// values.
//
//   EK_RETURN_IF_ERROR(AgreeOn(comm, "create", CheckOptions()).status());
//   // every rank receives the paths of all ranks; paths[0] is that of rank 0
//   EK_ASSIGN_OR_RETURN(const std::vector<std::string> paths, AgreeOn(comm, "save", status, path));
//
// Order:   a collective: every rank calls it, with the same topics in the same order.
// Errors:  every rank returns the same: the lowest failing rank's error, with its number in the job
//          in front (Communicator::members(); without it if all ranks report the same). If the
//          exchange fails, a rank's own error comes first.
// Threads: as ControlChannel::Exchange(). Waits at most for the group's timeout.

#ifndef EVENKEEL_COMM_AGREE_H_
#define EVENKEEL_COMM_AGREE_H_

#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "evenkeel/comm/communicator.h"

namespace evenkeel {

// Returns the values of all ranks, by rank, if every rank passed OK.
absl::StatusOr<std::vector<std::string>> AgreeOn(Communicator& comm, absl::string_view topic,
                                                 const absl::Status& own,
                                                 absl::string_view value = "");

// Does the same for long values that are usually equal. First only hashes are exchanged: if they
// are equal, the returned list is empty; else it has the values of all ranks.
absl::StatusOr<std::vector<std::string>> AgreeOnEqual(Communicator& comm, absl::string_view topic,
                                                      const absl::Status& own,
                                                      absl::string_view value);

// A property that must be equal on all ranks: {"parameter 3", "\"fc1.weight\" float32[64, 10]"}.
struct Fact {
  std::string what;
  std::string value;
};
// A collective. Returns on every rank the lowest failing rank's `own` error, or InvalidArgument if
// the ranks' facts differ, with the first fact that does, and the ranks with each value. The group
// goes on.
absl::Status VerifySame(Communicator& comm, absl::string_view topic, const absl::Status& own,
                        absl::Span<const Fact> facts);

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_AGREE_H_
