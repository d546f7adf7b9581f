#include "evenkeel/comm/local/link.h"

#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <set>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <variant>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"
#include "evenkeel/comm/base/fields.h"
#include "evenkeel/comm/base/start_thread.h"
#include "evenkeel/comm/control/hub.h"
#include "evenkeel/comm/control/link_meter.h"
#include "evenkeel/comm/control/tree_link.h"
#include "evenkeel/comm/net/hmac.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {
namespace {

// Adds up the strings of a message, which is never serialized.
struct TextSize : FieldVisitor {
  size_t bytes = 0;

  void operator()(const auto&... fields) { (Add(fields), ...); }
  template <typename Field>
  void Add(const Field& field) {
    if constexpr (std::is_same_v<Field, std::string>) {
      bytes += field.size();
    } else if constexpr (FieldList<Field>) {
      for (const auto& item : field) Add(item);
    } else if constexpr (requires { Field::VisitFields(field, *this); }) {
      Field::VisitFields(field, *this);
    }
  }
};

size_t SizeInMemory(const auto& message) {
  TextSize size;
  std::visit(size, message);
  return size.bytes;
}

struct Letter {
  int from = kHub;
  std::variant<ToHub, ToRank> message;  // ToHub between ranks: up the tree.
};

// Letters that wait for one rank.
class Inbox {
 public:
  void Push(Letter letter) {
    absl::MutexLock lock(&mutex_);
    letters_.push_back(std::move(letter));
  }
  // Blocks until there is a letter; false once it is closed.
  bool Pop(Letter& letter) {
    absl::MutexLock lock(&mutex_);
    mutex_.Await(absl::Condition(this, &Inbox::HasNews));
    if (is_closed_) return false;
    letter = std::move(letters_.front());
    letters_.pop_front();
    return true;
  }
  void Close() {
    absl::MutexLock lock(&mutex_);
    is_closed_ = true;
  }

 private:
  bool HasNews() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return is_closed_ || !letters_.empty();
  }

  absl::Mutex mutex_;
  std::deque<Letter> letters_ ABSL_GUARDED_BY(mutex_);
  bool is_closed_ ABSL_GUARDED_BY(mutex_) = false;
};

// Takes letters out of an inbox, on a thread of its own.
class Reader {
 public:
  explicit Reader(Inbox& inbox) : inbox_(inbox) {}
  ~Reader() { Stop(); }

  absl::Status Start(std::function<void(Letter)> receive) {
    const auto run = [this, receive = std::move(receive)] {
      meter_.OnLinksThread();
      Letter letter;
      while (inbox_.Pop(letter)) {
        std::visit([this](auto& it) { meter_.Received(it, SizeInMemory(it)); }, letter.message);
        receive(std::move(letter));
      }
    };
    EK_ASSIGN_OR_RETURN(thread_, StartThread("the messages of ranks in this process", run));
    return absl::OkStatus();
  }
  void Stop() {
    inbox_.Close();
    if (thread_.joinable()) thread_.join();
  }
  LinkMeter& meter() { return meter_; }
  const LinkMeter& meter() const { return meter_; }

 private:
  Inbox& inbox_;
  LinkMeter meter_;
  std::thread thread_;
};

class Star {
 public:
  explicit Star(int world_size)
      : inboxes_(world_size),
        edges_(world_size),
        hub_(world_size, [this](absl::Span<const int> to, const ToRank& message) {
          for (const int rank : to) inboxes_[rank].Push({kHub, message});
        }) {}

  Inbox& inbox(int rank) { return inboxes_[rank]; }
  // The letters from a rank's neighbours in the tree.
  Inbox& edges(int rank) { return edges_[rank]; }
  void Send(int rank, ToHub message) {
    absl::MutexLock lock(&order_);
    hub_.OnMessage(rank, std::move(message));
  }
  void Disconnect(int rank) {
    absl::MutexLock lock(&order_);
    hub_.OnDisconnect(rank);
  }

 private:
  std::vector<Inbox> inboxes_;
  std::vector<Inbox> edges_;
  absl::Mutex
      order_;  // So that every rank is told things in the order in which the hub decided them.
  ControlHub hub_;
};

// The groups of one set of ranks, and what only they know.
class Job {
 public:
  explicit Job(int fanout) : fanout_(fanout), secret_(RandomBytes(kDigestSize).value_or("")) {}

  int fanout() const { return fanout_; }

  absl::StatusOr<std::shared_ptr<Star>> Sit(absl::string_view group, int rank, int world_size) {
    absl::MutexLock lock(&mutex_);
    Group& found = groups_[std::string(group)];
    if (found.star == nullptr) found = {std::make_shared<Star>(world_size), world_size, {}};
    if (found.world_size != world_size) {
      return absl::InvalidArgumentError(
          absl::StrCat("rank ", rank, " expects that the group ", group, " has ", world_size,
                       " ranks, the other ranks have ", found.world_size));
    }
    if (!found.seated.insert(rank).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("two threads claim to be rank ", rank, " of ", group));
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

  const int fanout_;
  const std::string secret_;
  absl::Mutex mutex_;
  std::map<std::string, Group> groups_ ABSL_GUARDED_BY(mutex_);
};

class LocalEdges : public TreeEdges {
 public:
  LocalEdges(std::shared_ptr<Star> star, int rank, int parent)
      : star_(std::move(star)), rank_(rank), parent_(parent), reader_(star_->edges(rank)) {}

  void Start(std::function<void(int, ToHub)> from_child, std::function<void(ToRank)> from_parent,
             std::function<void(int, const absl::Status&)> lost) override {
    const absl::Status started = reader_.Start(
        [from_child = std::move(from_child), from_parent = std::move(from_parent)](Letter letter) {
          if (auto* up = std::get_if<ToHub>(&letter.message)) {
            from_child(letter.from, std::move(*up));
          } else {
            from_parent(std::get<ToRank>(std::move(letter.message)));
          }
        });
    if (!started.ok()) lost(kHub, started);
  }
  bool HasAddress() const override { return false; }
  std::string Address() const override { return ""; }
  void AttachParent(const std::string&) override {}
  void SendToParent(const ToHub& message) override { SendTo(parent_, message); }
  void SendToChildren(absl::Span<const int> to, const ToRank& message) override {
    for (const int child : to) SendTo(child, message);
  }
  void Stop() override { reader_.Stop(); }
  ControlCounters Counters() const override { return reader_.meter().Read(); }

 private:
  void SendTo(int neighbour, const auto& message) {
    reader_.meter().Sent(message, SizeInMemory(message));
    star_->edges(neighbour).Push({rank_, message});
  }

  const std::shared_ptr<Star> star_;
  const int rank_;
  const int parent_;
  Reader reader_;
};

std::unique_ptr<ControlLink> MakeLink(std::shared_ptr<Job> job, std::shared_ptr<Star> star,
                                      int rank, int world_size);

class LocalLink : public ControlLink {
 public:
  LocalLink(std::shared_ptr<Job> job, std::shared_ptr<Star> star, int rank)
      : job_(std::move(job)), star_(std::move(star)), rank_(rank), reader_(star_->inbox(rank)) {}
  ~LocalLink() override { Stop(); }

  void Start(std::function<void(ToRank)> receive, std::function<void(absl::Status)> lost) override {
    const absl::Status started = reader_.Start([receive = std::move(receive)](Letter letter) {
      receive(std::get<ToRank>(std::move(letter.message)));
    });
    if (started.ok()) return;
    // The hub reports it to the other ranks.
    Send(to_hub::Failed{.why = started});
    lost(started);
  }
  void Send(ToHub message) override {
    reader_.meter().Sent(message, SizeInMemory(message));
    star_->Send(rank_, std::move(message));
  }
  ControlCounters Counters() const override { return reader_.meter().Read(); }
  absl::StatusOr<std::unique_ptr<ControlLink>> Open(absl::string_view group, int rank,
                                                    int world_size, absl::Duration,
                                                    const Origin&) override {
    EK_ASSIGN_OR_RETURN(std::shared_ptr<Star> star, job_->Sit(group, rank, world_size));
    return MakeLink(job_, std::move(star), rank, world_size);
  }
  std::string Key(absl::string_view purpose) const override { return job_->Key(purpose); }
  void Stop() override {
    if (has_stopped_) return;
    has_stopped_ = true;
    reader_.Stop();
    star_->Disconnect(rank_);
  }

 private:
  const std::shared_ptr<Job> job_;
  const std::shared_ptr<Star> star_;
  const int rank_;
  Reader reader_;
  bool has_stopped_ = false;
};

std::unique_ptr<ControlLink> MakeLink(std::shared_ptr<Job> job, std::shared_ptr<Star> star,
                                      int rank, int world_size) {
  const TreeShape shape{.world_size = world_size, .fanout = job->fanout()};
  auto direct = std::make_unique<LocalLink>(std::move(job), star, rank);
  if (shape.is_star()) return direct;
  return std::make_unique<TreeLink>(
      shape, rank, std::move(direct),
      std::make_unique<LocalEdges>(std::move(star), rank, shape.ParentOf(rank)));
}

}  // namespace

std::vector<std::unique_ptr<ControlLink>> CreateLocalLinks(int world_size, int fanout) {
  auto job = std::make_shared<Job>(fanout);
  auto star = std::make_shared<Star>(world_size);
  std::vector<std::unique_ptr<ControlLink>> links;
  for (int rank = 0; rank < world_size; ++rank)
    links.push_back(MakeLink(job, star, rank, world_size));
  return links;
}

}  // namespace evenkeel::internal
