#include "evenkeel/comm/internal/gloo_mesh.h"

#include <algorithm>
#include <utility>

#include "absl/memory/memory.h"
#include "absl/time/clock.h"
#include "evenkeel/comm/internal/gloo_transport_meeting.h"
#include "evenkeel/comm/internal/socket.h"
#include "evenkeel/comm/status.h"
#include "gloo/context.h"

namespace evenkeel::internal {
namespace {

// Far beyond any deadline, and Gloo's arithmetic holds it.
constexpr absl::Duration kLongest = absl::Hours(99);
// A waiter that gives up at the deadline knows better what it waited for, so it comes first.
constexpr absl::Duration kSlack = absl::Milliseconds(250);

class OurContext : public gloo::Context {
 public:
  explicit OurContext(std::shared_ptr<GlooTransport> transport) : gloo::Context(transport->rank, transport->size) {
    transportContext_ = std::move(transport);
  }
};

}  // namespace

absl::StatusOr<std::unique_ptr<GlooMesh>> GlooMesh::Create(int rank, const PeerGroup& group,
                                                           const std::string& bind_address,
                                                           GlooTransportOptions options) {
  EK_ASSIGN_OR_RETURN(std::unique_ptr<GlooMeeting> meeting,
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
  context_ = std::make_shared<OurContext>(transport);
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

std::chrono::milliseconds GlooTimeout(absl::Time deadline) {
  const absl::Duration left = std::min(deadline - absl::Now() + kSlack, kLongest);
  return absl::ToChronoMilliseconds(std::max(left, absl::Milliseconds(1)));
}

}  // namespace evenkeel::internal
