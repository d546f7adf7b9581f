#include "evenkeel/comm/gloo/mesh.h"

#include <utility>

#include "absl/memory/memory.h"
#include "evenkeel/comm/gloo/meeting.h"
#include "evenkeel/comm/net/socket.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {

absl::StatusOr<std::unique_ptr<GlooMesh>> GlooMesh::Create(int rank, const PeerGroup& group,
                                                           const std::string& bind_address,
                                                           GlooTransportOptions options) {
  EK_ASSIGN_OR_RETURN(
      std::unique_ptr<GlooMeeting> meeting,
      GlooMeeting::Create(rank, group, {.bind_address = bind_address, .warn = options.warn}));
  options.names = group.names;
  return absl::WrapUnique(new GlooMesh(rank, std::move(options), std::move(meeting)));
}

GlooMesh::GlooMesh(int rank, GlooTransportOptions options, std::unique_ptr<GlooMeeting> meeting)
    : rank_(rank), options_(std::move(options)), meeting_(std::move(meeting)) {}

GlooMesh::~GlooMesh() = default;

const std::string& GlooMesh::address() const { return meeting_->address(); }

absl::Status GlooMesh::Connect(const std::vector<std::string>& addresses, absl::Time deadline) {
  EK_ASSIGN_OR_RETURN(std::vector<UniqueFd> connections, meeting_->Run(addresses, deadline));
  EK_ASSIGN_OR_RETURN(std::shared_ptr<GlooTransport> transport,
                      GlooTransport::Create(rank_, std::move(connections), options_));
  absl::MutexLock lock(&mutex_);
  if (!aborted_.ok()) return aborted_;
  transport_ = std::move(transport);
  return absl::OkStatus();
}

void GlooMesh::Abort(const absl::Status& why) {
  meeting_->Cancel(why);
  std::shared_ptr<GlooTransport> transport;
  {
    absl::MutexLock lock(&mutex_);
    if (aborted_.ok()) aborted_ = why;
    transport = transport_;
  }
  if (transport != nullptr) transport->Abort(why);
}

}  // namespace evenkeel::internal
