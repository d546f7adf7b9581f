#include "evenkeel/comm/local_link.h"

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "evenkeel/comm/internal/control_hub.h"
#include "evenkeel/comm/internal/hmac.h"
#include "evenkeel/comm/internal/link_meter.h"
#include "evenkeel/comm/status.h"

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

// The groups of one set of ranks, and what only they know.
class Job {
 public:
  Job() : secret_(RandomBytes(kDigestSize).value_or("")) {}

  absl::StatusOr<std::shared_ptr<Star>> Sit(absl::string_view group, int rank, int world_size) {
    absl::MutexLock lock(&mutex_);
    Group& found = groups_[std::string(group)];
    if (found.star == nullptr) found = {std::make_shared<Star>(world_size), world_size, {}};
    if (found.world_size != world_size) {
      return absl::InvalidArgumentError(absl::StrCat("rank ", rank, " says that the group ", group, " has ", world_size,
                                                     " ranks, the others say ", found.world_size));
    }
    if (!found.seated.insert(rank).second) {
      return absl::InvalidArgumentError(absl::StrCat("two threads say that they are rank ", rank, " of ", group));
    }
    return found.star;
  }
  std::string Key(absl::string_view purpose) const { return HmacSha256(secret_, purpose); }

 private:
  struct Group {
    std::shared_ptr<Star> star;
    int world_size = 0;
    std::set<int> seated;
  };

  const std::string secret_;
  absl::Mutex mutex_;
  std::map<std::string, Group> groups_ ABSL_GUARDED_BY(mutex_);
};

class LocalLink : public ControlLink {
 public:
  LocalLink(std::shared_ptr<Job> job, std::shared_ptr<Star> star, int rank)
      : job_(std::move(job)), star_(std::move(star)), rank_(rank) {}
  ~LocalLink() override { Stop(); }

  void Start(std::function<void(ControlMessage)> receive, std::function<void(absl::Status)>) override {
    thread_ = std::thread([this, receive = std::move(receive)] {
      meter_.OnLinksThread();
      ControlMessage message;
      while (star_->inbox(rank_).Pop(message)) {
        meter_.Received(message, SizeInMemory(message));
        receive(std::move(message));
      }
    });
  }
  void Send(ControlMessage message) override {
    meter_.Sent(message, SizeInMemory(message));
    star_->Send(rank_, std::move(message));
  }
  ControlCounters Counters() const override { return meter_.Read(); }
  absl::StatusOr<std::unique_ptr<ControlLink>> Open(absl::string_view group, int rank, int world_size) override {
    EK_ASSIGN_OR_RETURN(std::shared_ptr<Star> star, job_->Sit(group, rank, world_size));
    return std::make_unique<LocalLink>(job_, std::move(star), rank);
  }
  std::string Key(absl::string_view purpose) const override { return job_->Key(purpose); }
  void Stop() override {
    if (has_stopped_) return;
    has_stopped_ = true;
    star_->inbox(rank_).Close();
    if (thread_.joinable()) thread_.join();
    star_->Disconnect(rank_);
  }

 private:
  const std::shared_ptr<Job> job_;
  const std::shared_ptr<Star> star_;
  const int rank_;
  LinkMeter meter_;
  std::thread thread_;
  bool has_stopped_ = false;
};

}  // namespace

std::vector<std::unique_ptr<ControlLink>> CreateLocalLinks(int world_size) {
  auto job = std::make_shared<Job>();
  auto star = std::make_shared<Star>(world_size);
  std::vector<std::unique_ptr<ControlLink>> links;
  for (int rank = 0; rank < world_size; ++rank) links.push_back(std::make_unique<LocalLink>(job, star, rank));
  return links;
}

}  // namespace evenkeel::internal
