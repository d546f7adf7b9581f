#include "evenkeel/comm/internal/gloo_mesh.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "absl/time/clock.h"
#include "evenkeel/comm/internal/block_sigpipe.h"
#include "gloo/context.h"
#include "gloo/transport/context.h"
#include "gloo/transport/device.h"
#include "gloo/transport/pair.h"
#include "gloo/transport/tcp/device.h"
#include "gloo/transport/unbound_buffer.h"

namespace evenkeel::internal {
namespace {

// Gloo's own slots have 0x01 to 0x08 in the top byte; nobody ever sends on this one.
constexpr uint64_t kSilentSlot = uint64_t{0x7f} << 56;
// Beyond it Gloo's arithmetic overflows.
constexpr absl::Duration kLongest = absl::Hours(99);
// A waiter that gives up at the deadline knows better what it waited for, so it comes first.
constexpr absl::Duration kSlack = absl::Milliseconds(250);

// Gloo waits five times its timeout for a connection.
constexpr int kConnectFactor = 5;

class OurContext : public gloo::Context {
 public:
  OurContext(int rank, int world_size, std::shared_ptr<gloo::transport::Device> device, absl::Duration connect_timeout)
      : gloo::Context(rank, world_size) {
    device_ = std::move(device);
    transportContext_ = device_->createContext(rank, world_size);
    transportContext_->setTimeout(absl::ToChronoMilliseconds(
        std::clamp(connect_timeout / kConnectFactor, absl::Milliseconds(1), kLongest / kConnectFactor)));
    for (int peer = 0; peer < world_size; ++peer) {
      if (peer != rank) transportContext_->createPair(peer);
    }
  }
};

}  // namespace

GlooMesh::GlooMesh(int rank, int world_size, const std::string& bind_address, absl::Duration connect_timeout) {
  const BlockSigpipe block;  // For Gloo's own thread as well.
  gloo::transport::tcp::attr attributes;
  attributes.hostname = bind_address;
  context_ =
      std::make_shared<OurContext>(rank, world_size, gloo::transport::tcp::CreateDevice(attributes), connect_timeout);
}

GlooMesh::~GlooMesh() = default;

void GlooMesh::ForEachPair(absl::FunctionRef<void(int, gloo::transport::Pair&)> visit) const {
  for (int peer = 0; peer < context_->size; ++peer) {
    if (peer != context_->rank) visit(peer, *context_->getPair(peer));
  }
}

std::vector<std::string> GlooMesh::Addresses() const {
  std::vector<std::string> addresses(context_->size);
  ForEachPair([&](int peer, gloo::transport::Pair& pair) {
    const std::vector<char> bytes = pair.address().bytes();
    addresses[peer].assign(bytes.begin(), bytes.end());
  });
  return addresses;
}

void GlooMesh::Connect(const std::vector<std::string>& theirs) {
  const BlockSigpipe block;
  ForEachPair([&](int peer, gloo::transport::Pair& pair) {
    if (!is_broken_) pair.connect(std::vector<char>(theirs[peer].begin(), theirs[peer].end()));
  });
  is_connected_ = true;
}

// Until a pair is connected, closing wakes who waits for that. Later closing wakes nobody: what does is a wait that
// expires, because Gloo then breaks all pairs of the context. It can only begin on a pair that is not broken yet.
void GlooMesh::Break() {
  const BlockSigpipe block;
  is_broken_ = true;
  char byte = 0;
  ForEachPair([&](int peer, gloo::transport::Pair& pair) {
    try {
      if (!is_connected_) return pair.close();
      const std::unique_ptr<gloo::transport::UnboundBuffer> buffer = context_->createUnboundBuffer(&byte, 1);
      buffer->recv(peer, kSilentSlot, 0, 1);
      buffer->waitRecv(std::chrono::milliseconds(1));
    } catch (const std::exception&) {
      // That is what it was for; or this pair is broken already.
    }
  });
}

std::chrono::milliseconds GlooTimeout(absl::Time deadline) {
  const absl::Duration left = std::min(deadline - absl::Now() + kSlack, kLongest);
  return absl::ToChronoMilliseconds(std::max(left, absl::Milliseconds(1)));
}

}  // namespace evenkeel::internal
