#include "evenkeel/comm/control.h"

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/synchronization/notification.h"
#include "absl/time/clock.h"

namespace evenkeel {
namespace {

constexpr char kRegroupTopic[] = "\tregroup";  // A tab: nobody's exchange is called so.

}  // namespace

std::string RankList(const std::vector<int>& ranks) {
  return absl::StrCat(ranks.size() == 1 ? "rank " : "ranks ", absl::StrJoin(ranks, ","));
}

// ControlHub ---------------------------------------------------------------------------------------------------------

ControlHub::ControlHub(int world_size, std::function<void(int, ControlMessage)> deliver)
    : world_size_(world_size), deliver_(std::move(deliver)) {}

void ControlHub::OnMessage(int rank, ControlMessage message) {
  Outbox outbox;
  {
    absl::MutexLock lock(&mutex_);
    Handle(rank, std::move(message), outbox);
  }
  for (auto& [to, out] : outbox) deliver_(to, std::move(out));
}

void ControlHub::OnDisconnect(int rank) {
  Outbox outbox;
  {
    absl::MutexLock lock(&mutex_);
    if (!left_.contains(rank)) {
      lost_.insert(rank);
      FailAll(rank, absl::StatusCode::kUnavailable,
              absl::StrCat("rank ", rank, " of ", world_size_,
                           " is lost: it was killed, crashed, or left without Finalize"),
              outbox);
    }
    RegroupIfComplete(outbox);
  }
  for (auto& [to, out] : outbox) deliver_(to, std::move(out));
}

void ControlHub::Handle(int rank, ControlMessage message, Outbox& outbox) {
  using Type = ControlMessage::Type;
  // What goes on after a failure.
  if (message.type == Type::kBeat) {
    outbox.push_back({rank, {.type = Type::kBeat}});
    return;
  }
  if (message.type == Type::kRegroup) {
    regrouping_[rank] = message.request;
    return RegroupIfComplete(outbox);
  }
  if (message.type == Type::kMissing) {
    const std::vector<int> missing = MissingFrom(message.topic, message.sequence);
    std::string text = missing.empty() ? "" : RankList(missing);
    outbox.push_back({rank, {.type = Type::kValue, .request = message.request, .payload = std::move(text)}});
    return;
  }
  if (failure_.code != absl::StatusCode::kOk) {
    // Whoever still asks for something came too late to be told.
    if (message.type == Type::kExchange || message.type == Type::kGet) outbox.emplace_back(rank, failure_);
    if (message.type == Type::kLeave) left_.insert(rank);
    return RegroupIfComplete(outbox);
  }
  switch (message.type) {
    case Type::kExchange:
      return HandleExchange(rank, std::move(message), outbox);
    case Type::kPut: {
      for (const auto& [waiter, request] : waiting_[message.topic]) {
        outbox.push_back({waiter, {.type = Type::kValue, .request = request, .payload = message.payload}});
      }
      waiting_.erase(message.topic);
      values_[std::move(message.topic)] = std::move(message.payload);
      return;
    }
    case Type::kGet: {
      auto value = values_.find(message.topic);
      if (value == values_.end()) {
        waiting_[message.topic].emplace_back(rank, message.request);
      } else {
        outbox.push_back({rank, {.type = Type::kValue, .request = message.request, .payload = value->second}});
      }
      return;
    }
    case Type::kSend: {
      const int to = message.rank;
      if (to < 0 || to >= world_size_) return;
      message.rank = rank;
      outbox.emplace_back(to, std::move(message));
      return;
    }
    case Type::kNotice: {
      message.rank = rank;
      for (int to = 0; to < world_size_; ++to) {
        if (to != rank) outbox.emplace_back(to, message);
      }
      return;
    }
    case Type::kFailed:
      return FailAll(rank, message.code, std::move(message.payload), outbox);
    case Type::kLeave:
      return HandleLeave(rank, outbox);
    case Type::kBeat:
    case Type::kMissing:
    case Type::kRegroup:
      return;  // Done above.
    case Type::kExchanged:
    case Type::kRegrouped:
    case Type::kValue:
      return;  // Only the hub says these.
  }
}

void ControlHub::HandleExchange(int rank, ControlMessage message, Outbox& outbox) {
  const std::pair<std::string, int64_t> key(message.topic, message.sequence);
  Pending& pending = pending_[key];
  if (pending.parts.empty()) {
    pending.parts.resize(world_size_);
    pending.arrived.resize(world_size_);
    pending.missing = world_size_;
  }
  if (pending.arrived[rank]) return;
  pending.arrived[rank] = true;
  pending.parts[rank] = std::move(message.payload);
  if (--pending.missing == 0) {
    for (int to = 0; to < world_size_; ++to) {
      outbox.push_back({to,
                        {.type = ControlMessage::Type::kExchanged,
                         .sequence = key.second,
                         .topic = key.first,
                         .parts = pending.parts}});
    }
    pending_.erase(key);
    return;
  }
  for (int gone : left_) {
    if (pending.arrived[gone]) continue;
    return FailAll(gone, absl::StatusCode::kFailedPrecondition,
                   absl::StrCat("rank ", gone, " has left (Finalize) while rank ", rank, " is at \"", key.first, "\" #",
                                key.second, ": the ranks disagree"),
                   outbox);
  }
}

void ControlHub::HandleLeave(int rank, Outbox& outbox) {
  left_.insert(rank);
  for (const auto& [key, pending] : pending_) {
    if (pending.arrived[rank]) continue;
    std::vector<int> waiting;
    for (int r = 0; r < world_size_; ++r) {
      if (pending.arrived[r]) waiting.push_back(r);
    }
    return FailAll(rank, absl::StatusCode::kFailedPrecondition,
                   absl::StrCat("rank ", rank, " has left (Finalize) while ", RankList(waiting), " wait at \"",
                                key.first, "\" #", key.second, ": the ranks disagree"),
                   outbox);
  }
}

std::vector<int> ControlHub::MissingFrom(const std::string& topic, int64_t sequence) const {
  std::vector<int> missing;
  if (topic == kRegroupTopic) {
    for (int r = 0; r < world_size_; ++r) {
      if (!regrouping_.contains(r) && !left_.contains(r) && !lost_.contains(r)) missing.push_back(r);
    }
    return missing;
  }
  auto pending = pending_.find({topic, sequence});
  for (int r = 0; pending != pending_.end() && r < world_size_; ++r) {
    if (!pending->second.arrived[r]) missing.push_back(r);
  }
  return missing;
}

void ControlHub::RegroupIfComplete(Outbox& outbox) {
  if (regrouping_.empty() || !MissingFrom(kRegroupTopic, 0).empty()) return;
  ++regrouped_;
  std::vector<int> survivors;
  for (const auto& [rank, request] : regrouping_) {
    if (!lost_.contains(rank)) survivors.push_back(rank);
  }
  for (const auto& [rank, request] : regrouping_) {
    outbox.push_back({rank,
                      {.type = ControlMessage::Type::kRegrouped,
                       .sequence = regrouped_,
                       .request = request,
                       .payload = absl::StrJoin(survivors, ",")}});
  }
  regrouping_.clear();
}

void ControlHub::FailAll(int culprit, absl::StatusCode code, std::string message, Outbox& outbox) {
  if (failure_.code != absl::StatusCode::kOk) return;
  failure_ = {.type = ControlMessage::Type::kFailed,
              .rank = culprit,
              .code = code == absl::StatusCode::kOk ? absl::StatusCode::kUnknown : code,
              .payload = std::move(message)};
  for (int to = 0; to < world_size_; ++to) {
    if (!left_.contains(to)) outbox.emplace_back(to, failure_);
  }
}

// ControlChannel -----------------------------------------------------------------------------------------------------

ControlChannel::ControlChannel(int rank, int world_size, std::unique_ptr<ControlLink> link)
    : rank_(rank), world_size_(world_size), link_(std::move(link)) {
  link_->Start([this](ControlMessage message) { OnMessage(std::move(message)); },
               [this](absl::Status why) { OnLost(why); });
}

ControlChannel::~ControlChannel() { Stop(); }

void ControlChannel::Stop() {
  Close(absl::CancelledError("the communicator is gone"));
  link_->Stop();
}

void ControlChannel::Exchange(absl::string_view topic, std::string payload, ExchangeCallback done) {
  ControlMessage message{
      .type = ControlMessage::Type::kExchange, .topic = std::string(topic), .payload = std::move(payload)};
  absl::Status closed;
  {
    absl::MutexLock lock(&mutex_);
    closed = closed_;
    if (closed.ok()) {
      message.sequence = sequences_[message.topic]++;
      exchanges_[{message.topic, message.sequence}] = std::move(done);
    }
  }
  if (!closed.ok()) return done(closed);
  link_->Send(std::move(message));
}

absl::StatusOr<ControlChannel::Parts> ControlChannel::Exchange(absl::string_view topic, std::string payload,
                                                               absl::Duration timeout) {
  struct Result {
    absl::Notification done;
    absl::StatusOr<Parts> parts = absl::UnknownError("pending");
  };
  auto result = std::make_shared<Result>();
  int64_t sequence = 0;
  {
    absl::MutexLock lock(&mutex_);
    auto found = sequences_.find(topic);
    if (found != sequences_.end()) sequence = found->second;
  }
  Exchange(topic, std::move(payload), [result](const absl::StatusOr<Parts>& parts) {
    result->parts = parts;
    result->done.Notify();
  });
  if (result->done.WaitForNotificationWithTimeout(timeout)) return result->parts;
  const std::string missing = WhoIsMissing(topic, sequence);
  return absl::DeadlineExceededError(absl::StrCat("rank ", rank_, " waited ", absl::FormatDuration(timeout), " at \"",
                                                  topic, "\" #", sequence, " for ",
                                                  missing.empty() ? "the other ranks" : missing));
}

void ControlChannel::Put(absl::string_view key, std::string value) {
  link_->Send({.type = ControlMessage::Type::kPut, .topic = std::string(key), .payload = std::move(value)});
}

absl::StatusOr<std::string> ControlChannel::Get(absl::string_view key, absl::Duration timeout) {
  absl::StatusOr<ControlMessage> value =
      Request({.type = ControlMessage::Type::kGet, .topic = std::string(key)}, timeout);
  if (value.ok()) return std::move(value->payload);
  if (!absl::IsDeadlineExceeded(value.status())) return value.status();
  return absl::DeadlineExceededError(
      absl::StrCat("rank ", rank_, " waited ", absl::FormatDuration(timeout), " for the value \"", key, "\""));
}

std::string ControlChannel::WhoIsMissing(absl::string_view topic, int64_t sequence) {
  absl::StatusOr<ControlMessage> missing =
      Request({.type = ControlMessage::Type::kMissing, .sequence = sequence, .topic = std::string(topic)},
              absl::Seconds(1), Until::kLost);
  return missing.ok() ? std::move(missing->payload) : "";
}

absl::StatusOr<ControlMessage> ControlChannel::Request(ControlMessage message, absl::Duration timeout, Until until) {
  const auto end = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return until == Until::kClosed ? closed_ : lost_; };
  int64_t id = 0;
  {
    absl::MutexLock lock(&mutex_);
    if (!end().ok()) return end();
    id = message.request = next_request_++;
    requests_[id] = nullptr;
  }
  link_->Send(std::move(message));
  absl::MutexLock lock(&mutex_);
  std::unique_ptr<ControlMessage>& answer = requests_[id];
  auto ready = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) { return answer != nullptr || !end().ok(); };
  mutex_.AwaitWithTimeout(absl::Condition(&ready), timeout);
  absl::StatusOr<ControlMessage> result = absl::DeadlineExceededError("no answer");
  if (answer != nullptr) {
    result = std::move(*answer);
  } else if (!end().ok()) {
    result = end();
  }
  requests_.erase(id);
  return result;
}

absl::StatusOr<ControlChannel::Survivors> ControlChannel::Regroup(absl::Duration timeout) {
  absl::StatusOr<ControlMessage> answer = Request({.type = ControlMessage::Type::kRegroup}, timeout, Until::kLost);
  if (absl::IsDeadlineExceeded(answer.status())) {
    const std::string missing = WhoIsMissing(kRegroupTopic, 0);
    return absl::DeadlineExceededError(absl::StrCat("rank ", rank_, " waited ", absl::FormatDuration(timeout), " for ",
                                                    missing.empty() ? "the other ranks" : missing,
                                                    " to want a new group, too, or to be gone"));
  }
  if (!answer.ok()) return answer.status();
  Survivors survivors{.ranks = {}, .round = answer->sequence};
  for (absl::string_view text : absl::StrSplit(answer->payload, ',', absl::SkipEmpty())) {
    int rank = 0;
    if (absl::SimpleAtoi(text, &rank)) survivors.ranks.push_back(rank);
  }
  return survivors;
}

void ControlChannel::Beat(std::string whereabouts, absl::Duration silence) {
  link_->Send({.type = ControlMessage::Type::kBeat,
               .request = absl::ToInt64Microseconds(silence),
               .payload = std::move(whereabouts)});
}

int64_t ControlChannel::received() const {
  absl::MutexLock lock(&mutex_);
  return received_;
}

void ControlChannel::Send(int to, absl::string_view topic, std::string payload) {
  link_->Send(
      {.type = ControlMessage::Type::kSend, .rank = to, .topic = std::string(topic), .payload = std::move(payload)});
}

absl::StatusOr<std::string> ControlChannel::Receive(absl::string_view topic, absl::Duration timeout) {
  absl::MutexLock lock(&mutex_);
  auto inbox = inbox_.end();
  auto ready = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    inbox = inbox_.find(topic);
    return inbox != inbox_.end() || !closed_.ok();
  };
  if (!mutex_.AwaitWithTimeout(absl::Condition(&ready), timeout)) {
    return absl::DeadlineExceededError(
        absl::StrCat("rank ", rank_, " waited ", absl::FormatDuration(timeout), " for a message \"", topic, "\""));
  }
  if (inbox == inbox_.end()) return closed_;
  std::string payload = std::move(inbox->second.front());
  inbox->second.pop_front();
  if (inbox->second.empty()) inbox_.erase(inbox);
  return payload;
}

void ControlChannel::Discard(absl::string_view topic) {
  absl::MutexLock lock(&mutex_);
  auto inbox = inbox_.find(topic);
  if (inbox == inbox_.end()) {
    unwanted_.insert(std::string(topic));
    return;
  }
  inbox->second.pop_front();
  if (inbox->second.empty()) inbox_.erase(inbox);
}

void ControlChannel::Notify(absl::string_view topic, std::string payload) {
  link_->Send({.type = ControlMessage::Type::kNotice, .topic = std::string(topic), .payload = std::move(payload)});
}

void ControlChannel::Fail(const absl::Status& why) {
  link_->Send({.type = ControlMessage::Type::kFailed, .code = why.code(), .payload = std::string(why.message())});
}

void ControlChannel::Leave() {
  {
    absl::MutexLock lock(&mutex_);
    leaving_ = true;
  }
  link_->Send({.type = ControlMessage::Type::kLeave});
}

void ControlChannel::SetHandlers(std::function<void(int, const absl::Status&)> on_failure,
                                 std::function<void(int, absl::string_view, absl::string_view)> on_notice) {
  std::vector<ControlMessage> early;
  {
    absl::MutexLock lock(&mutex_);
    on_failure_ = std::move(on_failure);
    on_notice_ = std::move(on_notice);
    early.swap(early_);
  }
  for (ControlMessage& message : early) Handle(std::move(message));
}

void ControlChannel::Close(const absl::Status& why) {
  std::map<std::pair<std::string, int64_t>, ExchangeCallback> exchanges;
  {
    absl::MutexLock lock(&mutex_);
    if (closed_.ok()) closed_ = why;
    exchanges.swap(exchanges_);
  }
  for (auto& [key, done] : exchanges) done(why);
}

void ControlChannel::OnMessage(ControlMessage message) {
  if (message.type == ControlMessage::Type::kBeat) return;  // The link has noticed.
  Handle(std::move(message));
  absl::MutexLock lock(&mutex_);
  ++received_;
}

void ControlChannel::Handle(ControlMessage message) {
  using Type = ControlMessage::Type;
  switch (message.type) {
    case Type::kExchanged: {
      ExchangeCallback done;
      {
        absl::MutexLock lock(&mutex_);
        auto exchange = exchanges_.find({message.topic, message.sequence});
        if (exchange == exchanges_.end()) return;
        done = std::move(exchange->second);
        exchanges_.erase(exchange);
      }
      return done(std::move(message.parts));
    }
    case Type::kRegrouped:
    case Type::kValue: {
      absl::MutexLock lock(&mutex_);
      auto request = requests_.find(message.request);
      if (request != requests_.end()) request->second = std::make_unique<ControlMessage>(std::move(message));
      return;
    }
    case Type::kSend: {
      absl::MutexLock lock(&mutex_);
      if (auto unwanted = unwanted_.find(message.topic); unwanted != unwanted_.end()) {
        unwanted_.erase(unwanted);
      } else {
        inbox_[message.topic].push_back(std::move(message.payload));
      }
      return;
    }
    case Type::kNotice:
    case Type::kFailed: {
      std::function<void(int, const absl::Status&)> on_failure;
      std::function<void(int, absl::string_view, absl::string_view)> on_notice;
      {
        absl::MutexLock lock(&mutex_);
        if (on_failure_ == nullptr) {
          early_.push_back(std::move(message));
          return;
        }
        on_failure = on_failure_;
        on_notice = on_notice_;
      }
      if (message.type == Type::kNotice) return on_notice(message.rank, message.topic, message.payload);
      return on_failure(message.rank, absl::Status(message.code, message.payload));
    }
    case Type::kExchange:
    case Type::kPut:
    case Type::kGet:
    case Type::kMissing:
    case Type::kLeave:
    case Type::kRegroup:
    case Type::kBeat:
      return;  // Only ranks say these; a beat says nothing more.
  }
}

void ControlChannel::OnLost(const absl::Status& why) {
  {
    absl::MutexLock lock(&mutex_);
    lost_ = why;
    if (leaving_) return;
  }
  Handle(
      {.type = ControlMessage::Type::kFailed, .rank = -1, .code = why.code(), .payload = std::string(why.message())});
}

}  // namespace evenkeel
