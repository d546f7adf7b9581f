// The machine-readable half of an error: why a group ended, and which ranks caused it.
//
//   absl::Status status = optimizer->Step();
//   if (const auto failure = FailureInfoOf(status);
//       failure.has_value() && failure->kind == FailureKind::kRankLost) {
//     EK_ASSIGN_OR_RETURN(Recovered recovered,                      // join/recovery.h
//                         Recover({ddp.get(), optimizer.get()}, *comm, {.why = status}));
//     comm = std::move(recovered.comm);
//   }
//
// Every error that ends a group carries one beside its message. Both are sent over the control
// plane, so that all ranks return the same message, kind and ranks. Only a rank whose own error
// ended the group keeps that error, with the code and the message that it had. Errors of a single
// call (a wrong argument) carry no FailureInfo.
//
// Units:   ranks are those of the group in which the failure happened.
// Threads: pure functions of values.

#ifndef EVENKEEL_COMM_FAILURE_INFO_H_
#define EVENKEEL_COMM_FAILURE_INFO_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/base/cpp20.h"

namespace evenkeel {

enum class FailureKind {
  kRankLost,      // `ranks` were killed, crashed, or fell silent.
  kRankFailed,    // `ranks` reported an error, aborted, or left the group for a new one.
  kDisagreement,  // The ranks called different operations, or `ranks` had ended (Finalize(),
                  // Leave()) where others went on: an error of the program. Or their replicas
                  // differ.
  kDeadline,      // `ranks` did not arrive in time. They may still live.
};
// "lost", "failed", "disagreement", "deadline".
absl::string_view ToString(FailureKind kind);

struct FailureInfo {
  FailureKind kind = FailureKind::kRankFailed;
  // The causes, ascending. Empty if they are not known. Of ranks that disagree, the smallest party;
  // all parties of that size if there are several.
  std::vector<int> ranks;
  // The collective or wait in which it happened: of `ranks` if they disagreed; else, where the
  // cause itself was in none, the one of this rank that failed with it. Empty outside of one.
  std::string operation;
  int64_t position = -1;  // The operation's number on its channel; -1 if there is none.
  int64_t step = -1;      // The training step in which it happened; -1 outside of steps.

  friend bool operator==(const FailureInfo&, const FailureInfo&) = default;
};

// Returns `status` with `info` in place of the one that it has; an OK status unchanged.
absl::Status WithFailureInfo(absl::Status status, const FailureInfo& info);
// Returns nothing for a status that carries none.
std::optional<FailureInfo> FailureInfoOf(const absl::Status& status);

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_FAILURE_INFO_H_
