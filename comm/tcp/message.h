// One half of a message between two ranks, while it is under way over a TcpTransport.
//
//   TcpMessage message(operation, transport, rank, generation, names, on_news);
//   ... after each call of on_news() ...
//   const std::optional<absl::Status> result = message.Result();
//   if (result.has_value()) ... it has ended ...
//
// A note goes ahead of the data, on a slot of the channel and the tag. Two ranks' notes meet in the
// order of their issue, whatever they say, so the receiver finds halves that differ:
// FailedPrecondition with both.
//
// Ownership: the transport and the operation's buffers must outlive it. Once it is gone, the
//            transport does not touch the buffers any more.
// Threads:   thread-compatible. `on_news` is called by any thread and must not call the transport.
// Errors:    those of the transport; ResourceExhausted without memory.

#ifndef EVENKEEL_COMM_TCP_MESSAGE_H_
#define EVENKEEL_COMM_TCP_MESSAGE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "evenkeel/comm/backend.h"
#include "evenkeel/comm/ranks/rank_names.h"
#include "evenkeel/comm/tcp/transport.h"

namespace evenkeel::internal {

class TcpMessage {
 public:
  TcpMessage(Operation operation, TcpTransport& transport, int rank, uint64_t generation,
             const RankNames& names, std::function<void()> on_news);

  const Operation& operation() const { return operation_; }
  // Empty while it is under way.
  std::optional<absl::Status> Result();

 private:
  bool IsSend() const { return operation_.what.kind == CollectiveKind::kSend; }
  absl::Status CheckNotes() const;

  const Operation operation_;
  const int rank_;
  const RankNames names_;
  std::unique_ptr<char[]> memory_;  // The elements, if the operation has not one view.
  TensorView data_;
  std::string note_;
  absl::Status failed_;
  TcpTransport::Pending ahead_, behind_;  // The note, the data.
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_TCP_MESSAGE_H_
