#include "evenkeel/comm/tcp/mesh.h"

#include <utility>

#include "absl/memory/memory.h"
#include "evenkeel/comm/net/peer_meeting.h"
#include "evenkeel/comm/net/socket.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {

absl::StatusOr<std::unique_ptr<TcpMesh>> TcpMesh::Create(int rank, const PeerGroup& group,
                                                         const std::string& bind_address,
                                                         TcpTransportOptions options) {
  EK_ASSIGN_OR_RETURN(std::unique_ptr<PeerMeeting> meeting,
                      PeerMeeting::OverTcp(rank, group, bind_address, {.warn = options.warn}));
  options.names = group.names;
  return absl::WrapUnique(new TcpMesh(rank, std::move(options), std::move(meeting)));
}

TcpMesh::TcpMesh(int rank, TcpTransportOptions options, std::unique_ptr<PeerMeeting> meeting)
    : rank_(rank), options_(std::move(options)), meeting_(std::move(meeting)) {}

TcpMesh::~TcpMesh() = default;

const std::string& TcpMesh::address() const { return meeting_->address(); }

absl::Status TcpMesh::Connect(const std::vector<std::string>& addresses, absl::Time deadline) {
  EK_ASSIGN_OR_RETURN(std::vector<UniqueFd> connections, meeting_->Run(addresses, deadline));
  EK_ASSIGN_OR_RETURN(std::shared_ptr<TcpTransport> transport,
                      TcpTransport::Create(rank_, std::move(connections), options_));
  absl::MutexLock lock(&mutex_);
  if (!aborted_.ok()) return aborted_;
  transport_ = std::move(transport);
  return absl::OkStatus();
}

void TcpMesh::Abort(const absl::Status& why) {
  meeting_->Cancel(why);
  std::shared_ptr<TcpTransport> transport;
  {
    absl::MutexLock lock(&mutex_);
    if (aborted_.ok()) aborted_ = why;
    transport = transport_;
  }
  if (transport != nullptr) transport->Abort(why);
}

}  // namespace evenkeel::internal
