#include "evenkeel/comm/internal/gloo_mesh.h"

#include <algorithm>
#include <exception>
#include <thread>
#include <utility>

#include "absl/time/clock.h"
#include "evenkeel/comm/internal/block_sigpipe.h"
#include "evenkeel/comm/internal/gloo_waits.h"
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

constexpr int kClosingThreads = 16;
// Gloo waits five times its timeout for a connection.
constexpr int kConnectFactor = 5;

class OurContext : public gloo::Context {
 public:
  OurContext(int rank, int world_size, std::shared_ptr<gloo::transport::Device> device, absl::Duration connect_timeout)
      : gloo::Context(rank, world_size) {
    device_ = std::move(device);
    const std::shared_ptr<gloo::transport::Context> transport = device_->createContext(rank, world_size);
    transport->setTimeout(absl::ToChronoMilliseconds(
        std::clamp(connect_timeout / kConnectFactor, absl::Milliseconds(1), kLongest / kConnectFactor)));
    endable_ = std::make_shared<EndableContext>(transport);
    transportContext_ = endable_;
    for (int peer = 0; peer < world_size; ++peer) {
      if (peer != rank) transportContext_->createPair(peer);
    }
  }

  const std::shared_ptr<EndableContext>& endable() const { return endable_; }

 private:
  std::shared_ptr<EndableContext> endable_;  // Is transportContext_.
};

}  // namespace

GlooMesh::GlooMesh(int rank, int world_size, const std::string& bind_address, absl::Duration connect_timeout) {
  const BlockSigpipe block;  // For Gloo's own thread as well.
  gloo::transport::tcp::attr attributes;
  attributes.hostname = bind_address;
  const auto context =
      std::make_shared<OurContext>(rank, world_size, gloo::transport::tcp::CreateDevice(attributes), connect_timeout);
  context_ = context;
  endable_ = context->endable();
}

// Closing a connection waits for a turn of Gloo's own thread, up to ten milliseconds, so we wait for many at a time.
GlooMesh::~GlooMesh() {
  std::vector<std::thread> threads;
  for (int first = 0; first < std::min(kClosingThreads, context_->size); ++first) {
    threads.emplace_back([this, first] {
      ForEachPair([&](int peer, gloo::transport::Pair& pair) {
        if (peer % kClosingThreads == first) pair.close();
      });
    });
  }
  for (std::thread& thread : threads) thread.join();
}

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

// Until a pair is connected, closing wakes who waits for that. Later closing wakes nobody: what breaks all pairs of the
// context, and wakes most, is a wait that expires. It can only begin on a pair that is not broken yet. It wakes nobody
// whose message is half way through, so their waits are ended as well.
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
  if (is_connected_) endable_->EndWaits();
}

std::chrono::milliseconds GlooTimeout(absl::Time deadline) {
  const absl::Duration left = std::min(deadline - absl::Now() + kSlack, kLongest);
  return absl::ToChronoMilliseconds(std::max(left, absl::Milliseconds(1)));
}

}  // namespace evenkeel::internal
