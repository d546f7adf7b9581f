#include "evenkeel/comm/internal/gloo_waits.h"

#include <set>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "gloo/common/error.h"

namespace evenkeel::internal {

using gloo::transport::UnboundBuffer;

// The buffers that exist. Outlives them: each has a reference.
class EndableContext::Registry {
 public:
  void Add(UnboundBuffer* buffer) {
    absl::MutexLock lock(&mutex_);
    buffers_.insert(buffer);
    if (has_ended_) End(*buffer);
  }

  void Remove(UnboundBuffer* buffer) {
    absl::MutexLock lock(&mutex_);
    buffers_.erase(buffer);
  }

  void EndAll() {
    absl::MutexLock lock(&mutex_);
    has_ended_ = true;
    for (UnboundBuffer* buffer : buffers_) End(*buffer);
  }

 private:
  // It holds for the next wait, if none is running.
  static void End(UnboundBuffer& buffer) {
    buffer.abortWaitSend();
    buffer.abortWaitRecv();
  }

  absl::Mutex mutex_;
  bool has_ended_ ABSL_GUARDED_BY(mutex_) = false;
  std::set<UnboundBuffer*> buffers_ ABSL_GUARDED_BY(mutex_);
};

// Hands everything on, except that an ended wait throws: Gloo's algorithms do not look at what a wait answers.
class EndableContext::Buffer : public UnboundBuffer {
 public:
  Buffer(std::unique_ptr<UnboundBuffer> inner, std::shared_ptr<Registry> registry)
      : UnboundBuffer(inner->ptr, inner->size), inner_(std::move(inner)), registry_(std::move(registry)) {
    registry_->Add(inner_.get());
  }
  ~Buffer() override { registry_->Remove(inner_.get()); }

  bool waitRecv(int* rank, std::chrono::milliseconds timeout) override {
    return OrThrow(inner_->waitRecv(rank, timeout));
  }
  bool waitSend(int* rank, std::chrono::milliseconds timeout) override {
    return OrThrow(inner_->waitSend(rank, timeout));
  }
  void abortWaitRecv() override { inner_->abortWaitRecv(); }
  void abortWaitSend() override { inner_->abortWaitSend(); }
  void send(int to, uint64_t slot, size_t offset, size_t bytes) override { inner_->send(to, slot, offset, bytes); }
  void recv(int from, uint64_t slot, size_t offset, size_t bytes) override { inner_->recv(from, slot, offset, bytes); }
  void recv(std::vector<int> from, uint64_t slot, size_t offset, size_t bytes) override {
    inner_->recv(std::move(from), slot, offset, bytes);
  }

 private:
  static bool OrThrow(bool completed) {
    if (!completed) throw gloo::IoException("the wait was ended");
    return completed;
  }

  const std::unique_ptr<UnboundBuffer> inner_;
  const std::shared_ptr<Registry> registry_;
};

EndableContext::EndableContext(std::shared_ptr<gloo::transport::Context> inner)
    : gloo::transport::Context(inner->rank, inner->size),
      inner_(std::move(inner)),
      registry_(std::make_shared<Registry>()) {
  setTimeout(inner_->getTimeout());
}

EndableContext::~EndableContext() = default;

std::unique_ptr<UnboundBuffer> EndableContext::createUnboundBuffer(void* data, size_t size) {
  return std::make_unique<Buffer>(inner_->createUnboundBuffer(data, size), registry_);
}

void EndableContext::EndWaits() { registry_->EndAll(); }

}  // namespace evenkeel::internal
