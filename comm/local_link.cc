#include "evenkeel/comm/local_link.h"

#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"

namespace evenkeel::internal {
namespace {

// What waits for one rank.
class Inbox {
 public:
  void Push(ControlMessage message) {
    absl::MutexLock lock(&mutex_);
    messages_.push_back(std::move(message));
  }
  // Blocks until there is a message; false once it is closed.
  bool Pop(ControlMessage& message) {
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(this, &Inbox::HasNews));
    if (is_closed_) return false;
    message = std::move(messages_.front());
    messages_.pop_front();
    return true;
  }
  void Close() {
    absl::MutexLock lock(&mutex_);
    is_closed_ = true;
  }

 private:
  bool HasNews() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return is_closed_ || !messages_.empty(); }

  absl::Mutex mutex_;
  std::deque<ControlMessage> messages_ ABSL_GUARDED_BY(mutex_);
  bool is_closed_ ABSL_GUARDED_BY(mutex_) = false;
};

class Star {
 public:
  explicit Star(int world_size)
      : inboxes_(world_size),
        hub_(world_size, [this](int rank, ControlMessage message) { inboxes_[rank].Push(std::move(message)); }) {}

  Inbox& inbox(int rank) { return inboxes_[rank]; }
  void Send(int rank, ControlMessage message) {
    absl::MutexLock lock(&order_);
    hub_.OnMessage(rank, std::move(message));
  }
  void Disconnect(int rank) {
    absl::MutexLock lock(&order_);
    hub_.OnDisconnect(rank);
  }

 private:
  std::vector<Inbox> inboxes_;
  absl::Mutex order_;  // So that every rank is told things in the order in which the hub decided them.
  ControlHub hub_;
};

class LocalLink : public ControlLink {
 public:
  LocalLink(std::shared_ptr<Star> star, int rank) : star_(std::move(star)), rank_(rank) {}
  ~LocalLink() override { Stop(); }

  void Start(std::function<void(ControlMessage)> receive, std::function<void(absl::Status)>) override {
    thread_ = std::thread([&inbox = star_->inbox(rank_), receive = std::move(receive)] {
      ControlMessage message;
      while (inbox.Pop(message)) receive(std::move(message));
    });
  }
  void Send(ControlMessage message) override { star_->Send(rank_, std::move(message)); }
  void Stop() override {
    if (has_stopped_) return;
    has_stopped_ = true;
    star_->inbox(rank_).Close();
    if (thread_.joinable()) thread_.join();
    star_->Disconnect(rank_);
  }

 private:
  const std::shared_ptr<Star> star_;
  const int rank_;
  std::thread thread_;
  bool has_stopped_ = false;
};

}  // namespace

std::vector<std::unique_ptr<ControlLink>> CreateLocalLinks(int world_size) {
  auto star = std::make_shared<Star>(world_size);
  std::vector<std::unique_ptr<ControlLink>> links;
  for (int rank = 0; rank < world_size; ++rank) links.push_back(std::make_unique<LocalLink>(star, rank));
  return links;
}

}  // namespace evenkeel::internal
