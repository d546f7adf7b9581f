// A transport of Gloo whose waits can all be ended from outside.
//
//   auto context = std::make_shared<EndableContext>(device->createContext(rank, world_size));
//   ... buffers of `context` in use on other threads ...
//   context->EndWaits();          // every waitSend() and waitRecv(), present and future, throws gloo::IoException
//
// Gloo itself tells a broken connection to the buffers that are queued on it, but not to one that is half sent or half
// received at that moment: its waiter would stay until its timeout. Every buffer has a way to abort its wait, though.
//
// Threads: as gloo::transport::Context; EndWaits() from any thread, any number of times.

#ifndef EVENKEEL_COMM_INTERNAL_GLOO_WAITS_H_
#define EVENKEEL_COMM_INTERNAL_GLOO_WAITS_H_

#include <memory>

#include "gloo/transport/context.h"
#include "gloo/transport/unbound_buffer.h"

namespace evenkeel::internal {

class EndableContext : public gloo::transport::Context {
 public:
  // Set timeouts on `inner` before.
  explicit EndableContext(std::shared_ptr<gloo::transport::Context> inner);
  ~EndableContext() override;

  std::unique_ptr<gloo::transport::Pair>& getPair(int rank) override { return inner_->getPair(rank); }
  std::unique_ptr<gloo::transport::Pair>& createPair(int rank) override { return inner_->createPair(rank); }
  std::unique_ptr<gloo::transport::UnboundBuffer> createUnboundBuffer(void* data, size_t size) override;

  void EndWaits();

 private:
  class Buffer;
  class Registry;

  const std::shared_ptr<gloo::transport::Context> inner_;
  const std::shared_ptr<Registry> registry_;
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_INTERNAL_GLOO_WAITS_H_
