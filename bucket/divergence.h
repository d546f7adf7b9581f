// Checks whether replicas are still equal, and finds the first tensor that differs and its ranks.
//
//   EK_ASSIGN_OR_RETURN(std::optional<Divergence> found,
//                       FindDivergence(params, comm, {.part = step, .parts = 16}));
//   // prints: "fc1.weight" (tensor 3) differs on rank 2
//   if (found.has_value()) std::cerr << ToString(*found) << std::endl;
//
// replica_check.h does it at regular steps.
//
// Each rank reads its values once and sends 24 bytes; only if those differ, eight bytes per tensor.
// With `parts` a call checks one part of the tensors, so that a check in every step costs little
// and still covers all of them in turn.
//
// Order:   a collective of the control plane: every rank calls it with tensors of the same names in
//          the same order, and with the same options. Returns the same on all ranks.
// Threads: blocking; for tensors on a device it also waits for the stream.
// Errors:  InvalidArgument on all ranks if they name different tensors; if the options of one are
//          out of range, or one of its tensors lies neither in the CPU's memory nor on the group's
//          device. An error of one rank's device is returned on all ranks, too.
// Source:  Marian's sanity check of its parameter shards, which reports only that they differ.

#ifndef EVENKEEL_BUCKET_DIVERGENCE_H_
#define EVENKEEL_BUCKET_DIVERGENCE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/types.h"

namespace evenkeel {

struct NamedView {
  std::string name;
  TensorView view;
};

struct Divergence {
  std::string tensor;  // The first that differs.
  int index = 0;       // Its place in the list.
  // Those that differ from the value that most ranks have. All ranks, with `is_split`, if no value
  // is the most frequent: of two ranks either may be wrong.
  std::vector<int> ranks;
  bool is_split = false;
  int tensors = 1;              // The number of tensors that differ.
  std::vector<int> any_tensor;  // The ranks that differ in any of them, in ascending order.
};

std::string ToString(const Divergence& divergence);

// Returns a hash of a tensor in the CPU's memory, the same on all ranks.
uint64_t HashOf(const TensorView& tensor);
// Returns a hash of tensors, also on a device, after the work on `stream`. No collective.
absl::StatusOr<uint64_t> HashOf(absl::Span<const NamedView> tensors, Communicator& comm,
                                StreamRef stream = {});

// Returns all parameters, in their order; ignored ones are empty.
std::vector<NamedView> NamedValuesOf(const ParameterSet& params);

struct DivergenceOptions {
  // Checks the tensors whose index is `part` modulo `parts` (at least 1); any part from 0 up.
  int64_t part = 0;
  int64_t parts = 1;
  // On a device: tensors are complete after the work on that stream; if null, when the call begins.
  StreamRef stream;
  // Calls from several threads of a rank need a topic each.
  std::string topic = "divergence";
  // The ranks whose tensors are compared, in ascending order, equal on all ranks; empty: all. The
  // others take part as well, with tensors of the same names.
  std::vector<int> among;
};

absl::StatusOr<std::optional<Divergence>> FindDivergence(absl::Span<const NamedView> tensors,
                                                         Communicator& comm,
                                                         const DivergenceOptions& options = {});
// Compares the parameters' values, on their stream. Ignored parameters are not compared.
absl::StatusOr<std::optional<Divergence>> FindDivergence(const ParameterSet& params,
                                                         Communicator& comm,
                                                         const DivergenceOptions& options = {});

}  // namespace evenkeel

#endif  // EVENKEEL_BUCKET_DIVERGENCE_H_
