#include "evenkeel/comm/control/control.h"

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/base/librarys_thread.h"
#include "evenkeel/comm/base/notification.h"
#include "evenkeel/comm/base/parties.h"
#include "evenkeel/comm/control/rank_status.h"
#include "evenkeel/comm/failure_info.h"

namespace evenkeel {
namespace {

using internal::Wait;
using internal::Waits;

}  // namespace

std::string RankList(const std::vector<int>& ranks) { return internal::RankList(ranks); }

ControlChannel::ControlChannel(int rank, int world_size, std::unique_ptr<ControlLink> link)
    : rank_(rank), world_size_(world_size), link_(std::move(link)) {
  link_->Start(
      [this](ControlMessage message) {
        internal::ThisThreadIsTheLibrarys();
        OnMessage(std::move(message));
      },
      [this](absl::Status why) { OnLost(why); });
}

ControlChannel::~ControlChannel() { Stop(); }

std::shared_ptr<Waits> ControlChannel::IfEndless(absl::Duration timeout) const {
  return timeout >= endless_ ? waits_ : nullptr;
}

void ControlChannel::Stop() {
  Close(absl::CancelledError("the communicator is gone"));
  link_->Stop();
}

void ControlChannel::Exchange(absl::string_view topic, std::string payload, ExchangeCallback done) {
  waits_->Use();
  ControlMessage message{.type = ControlMessage::Type::kExchange,
                         .topic = std::string(topic),
                         .payload = std::move(payload)};
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

absl::StatusOr<ControlChannel::Parts> ControlChannel::Exchange(absl::string_view topic,
                                                               std::string payload,
                                                               absl::Duration timeout) {
  struct Result {
    internal::Notification done;
    absl::StatusOr<Parts> parts = absl::UnknownError("pending");
  };
  auto result = std::make_shared<Result>();
  int64_t sequence = 0;
  {
    absl::MutexLock lock(&mutex_);
    auto found = sequences_.find(topic);
    if (found != sequences_.end()) sequence = found->second;
  }
  Exchange(topic, std::move(payload), [result](absl::StatusOr<Parts> parts) {
    result->parts = std::move(parts);
    result->done.Notify();
  });
  const Waits::Scope scope(
      IfEndless(timeout),
      [&] {
        return Wait{.kind = Wait::Kind::kExchange,
                    .sequence = sequence,
                    .topic = std::string(topic),
                    .text = absl::StrCat("\"", topic, "\" #", sequence,
                                         " until all ranks have reached it")};
      },
      [result] { return result->done.HasBeenNotified(); });
  if (result->done.WaitUntil(SteadyNow() + timeout)) return std::move(result->parts);
  const Missing missing = WhoIsMissing(topic, sequence);
  return internal::MissedDeadline(
      absl::StrCat("rank ", rank_, " waited ", absl::FormatDuration(timeout), " at \"", topic,
                   "\" #", sequence, " for ",
                   missing.text.empty() ? "the other ranks" : missing.text),
      missing.ranks, topic, sequence);
}

void ControlChannel::Put(absl::string_view key, std::string value) {
  waits_->Use();
  link_->Send(
      {.type = ControlMessage::Type::kPut, .topic = std::string(key), .payload = std::move(value)});
}

absl::StatusOr<std::string> ControlChannel::Get(absl::string_view key, absl::Duration timeout) {
  absl::StatusOr<ControlMessage> value =
      Request({.type = ControlMessage::Type::kGet, .topic = std::string(key)}, timeout,
              Until::kClosed, IfEndless(timeout));
  if (value.ok()) return std::move(value->payload);
  if (!absl::IsDeadlineExceeded(value.status())) return value.status();
  return internal::MissedDeadline(
      absl::StrCat("rank ", rank_, " waited ", absl::FormatDuration(timeout), " for the value \"",
                   key, "\""),
      {}, key);
}

ControlChannel::Missing ControlChannel::WhoIsMissing(const Wait& wait) {
  internal::RankStatus asked;
  asked.waits.push_back(wait);
  ControlMessage question{.type = ControlMessage::Type::kMissing, .payload = asked.Serialize()};
  absl::StatusOr<ControlMessage> missing = Request(question, absl::Milliseconds(500), Until::kLost);
  if (absl::IsDeadlineExceeded(missing.status())) {
    question.sequence = 1;  // A rank does not reply to the hub; this is information, too.
    missing = Request(question, absl::Milliseconds(500), Until::kLost);
  }
  if (!missing.ok()) return {};
  return {.ranks = FailureInfoOf(missing->status).value_or(FailureInfo()).ranks,
          .text = std::string(missing->status.message())};
}

ControlChannel::Missing ControlChannel::WhoIsMissing(absl::string_view topic, int64_t sequence) {
  return WhoIsMissing(
      Wait{.kind = Wait::Kind::kExchange, .sequence = sequence, .topic = std::string(topic)});
}

absl::StatusOr<ControlMessage> ControlChannel::Request(ControlMessage message,
                                                       absl::Duration timeout, Until until,
                                                       const std::shared_ptr<Waits>& waits) {
  const auto end = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return until == Until::kClosed ? closed_ : lost_;
  };
  const std::string text = absl::StrCat("the value \"", message.topic, "\"");
  int64_t id = 0;
  {
    absl::MutexLock lock(&mutex_);
    if (!end().ok()) return end();
    id = message.request = next_request_++;
    requests_[id] = nullptr;
  }
  bool is_over = false;  // Stays true, also after the reply was taken.
  const auto check = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return is_over = is_over || requests_[id] != nullptr || !end().ok();
  };
  const Waits::Scope scope(
      waits, [&text] { return Wait{.text = text}; },
      [&] {
        absl::MutexLock lock(&mutex_);
        return check();
      });
  link_->Send(std::move(message));
  absl::MutexLock lock(&mutex_);
  AwaitFor(mutex_, absl::Condition(&check), timeout);
  is_over = true;
  absl::StatusOr<ControlMessage> result = absl::DeadlineExceededError("no reply");
  if (requests_[id] != nullptr) {
    result = std::move(*requests_[id]);
  } else if (!end().ok()) {
    result = end();
  }
  requests_.erase(id);
  return result;
}

absl::StatusOr<ControlChannel::Survivors> ControlChannel::Regroup(absl::Duration timeout) {
  absl::StatusOr<ControlMessage> answer =
      Request({.type = ControlMessage::Type::kRegroup}, timeout, Until::kLost);
  if (absl::IsDeadlineExceeded(answer.status())) {
    const Missing missing = WhoIsMissing(kRegroupTopic, 0);
    return internal::MissedDeadline(
        absl::StrCat("rank ", rank_, " waited ", absl::FormatDuration(timeout), " for ",
                     missing.text.empty() ? "the other ranks" : missing.text,
                     " to regroup or to be lost"),
        missing.ranks);
  }
  if (!answer.ok()) {
    absl::MutexLock lock(&mutex_);
    if (cut_off_.ok()) return answer.status();
    return WithFailureInfo(absl::AbortedError(cut_off_.message()),
                           FailureInfoOf(cut_off_).value_or(FailureInfo()));
  }
  Survivors survivors{.ranks = {}, .round = answer->sequence};
  for (absl::string_view text : absl::StrSplit(answer->payload, ',', absl::SkipEmpty())) {
    int rank = 0;
    if (absl::SimpleAtoi(text, &rank)) survivors.ranks.push_back(rank);
  }
  return survivors;
}

absl::Status ControlChannel::SurvivorsStatus() const {
  absl::MutexLock lock(&mutex_);
  return lost_.ok() ? survivors_status_ : lost_;
}

void ControlChannel::Beat(std::string rank_status, absl::Duration silence) {
  link_->Send({.type = ControlMessage::Type::kBeat,
               .request = absl::ToInt64Microseconds(silence),
               .payload = std::move(rank_status)});
}

int64_t ControlChannel::received() const {
  absl::MutexLock lock(&mutex_);
  return received_;
}

void ControlChannel::Send(int to, absl::string_view topic, std::string payload) {
  waits_->Use();
  link_->Send({.type = ControlMessage::Type::kSend,
               .rank = to,
               .topic = std::string(topic),
               .payload = std::move(payload)});
}

void ControlChannel::Send(absl::Span<const int> to, absl::string_view topic, std::string payload) {
  if (to.empty()) return;
  waits_->Use();
  ControlMessage message{.type = ControlMessage::Type::kSend,
                         .topic = std::string(topic),
                         .payload = std::move(payload)};
  for (const int rank : to) message.parts.push_back({.count = rank});
  link_->Send(std::move(message));
}

absl::StatusOr<std::string> ControlChannel::Receive(absl::string_view topic, absl::Duration timeout,
                                                    const From& from) {
  bool is_over = false;  // Stays true, also after the message was taken.
  const auto check = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    return is_over = is_over || inbox_.find(topic) != inbox_.end() || !closed_.ok();
  };
  const Waits::Scope scope(
      from.is_endless ? waits_ : IfEndless(timeout),
      [&] {
        if (from.as.has_value()) return *from.as;
        return Wait{
            .peer = from.rank,
            .text = from.text.empty() ? absl::StrCat("a message \"", topic, "\"") : from.text};
      },
      [&] {
        absl::MutexLock lock(&mutex_);
        return check();
      });
  absl::MutexLock lock(&mutex_);
  const bool has_come = AwaitFor(mutex_, absl::Condition(&check), timeout);
  is_over = true;
  if (!has_come) {
    return internal::MissedDeadline(
        absl::StrCat("rank ", rank_, " waited ", absl::FormatDuration(timeout), " for a message \"",
                     topic, "\"", from.rank < 0 ? "" : absl::StrCat(" of rank ", from.rank)),
        from.rank < 0 ? std::vector<int>() : std::vector<int>{from.rank}, topic);
  }
  auto inbox = inbox_.find(topic);
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
  Notify(-1, topic, std::move(payload));
}

void ControlChannel::Notify(int to, absl::string_view topic, std::string payload) {
  waits_->Use();
  link_->Send({.type = ControlMessage::Type::kNotice,
               .rank = to,
               .topic = std::string(topic),
               .payload = std::move(payload)});
}

void ControlChannel::NotifyOnce(absl::string_view topic, std::string payload) {
  waits_->Use();
  link_->Send({.type = ControlMessage::Type::kNotice,
               .sequence = 1,
               .topic = std::string(topic),
               .payload = std::move(payload)});
}

void ControlChannel::Fail(const absl::Status& why, absl::Duration unheard) {
  link_->Send({.type = ControlMessage::Type::kFailed,
               .request = absl::ToInt64Microseconds(unheard),
               .status = why});
}

void ControlChannel::Leave() {
  {
    absl::MutexLock lock(&mutex_);
    leaving_ = true;
  }
  link_->Send({.type = ControlMessage::Type::kLeave});
}

void ControlChannel::SetHandlers(
    std::function<void(int, const absl::Status&)> on_failure,
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
  if (message.type == ControlMessage::Type::kBeat) return;  // Handled by the link.
  if (message.type == ControlMessage::Type::kFailed && message.sequence == 1) {
    absl::MutexLock lock(&mutex_);
    cut_off_ = message.status;
  }
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
      Parts parts;
      parts.reserve(world_size_);
      for (EqualParts& run : message.parts) {
        if (run.count < 1 || run.count > world_size_ - static_cast<int64_t>(parts.size())) break;
        parts.insert(parts.end(), run.count - 1, run.part);
        parts.push_back(std::move(run.part));
      }
      if (static_cast<int>(parts.size()) == world_size_) return done(std::move(parts));
      return done(absl::InternalError(absl::StrCat("\"", message.topic, "\" #", message.sequence,
                                                   ": the hub's reply is not for ", world_size_,
                                                   " ranks")));
    }
    case Type::kRegrouped:
    case Type::kValue: {
      absl::MutexLock lock(&mutex_);
      if (message.type == Type::kRegrouped) survivors_status_ = message.status;
      auto request = requests_.find(message.request);
      if (request != requests_.end())
        request->second = std::make_unique<ControlMessage>(std::move(message));
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
      if (message.type == Type::kNotice)
        return on_notice(message.rank, message.topic, message.payload);
      return on_failure(message.rank, message.status);
    }
    case Type::kExchange:
    case Type::kPut:
    case Type::kGet:
    case Type::kMissing:
    case Type::kLeave:
    case Type::kRegroup:
    case Type::kBeat:
    case Type::kHaveCome:
      return;  // Sent by ranks only; a beat was handled above.
  }
}

FailureInfo ControlChannel::HubLost() const {
  FailureInfo info{.kind = FailureKind::kRankLost};
  if (link_->HubRank() >= 0) info.ranks = {link_->HubRank()};
  return info;
}

void ControlChannel::OnLost(const absl::Status& why) {
  absl::Status reason;
  {
    absl::MutexLock lock(&mutex_);
    reason = FailureInfoOf(why).has_value() ? why : WithFailureInfo(why, HubLost());
    if (!cut_off_.ok()) reason = cut_off_;
    lost_ = reason;
    if (leaving_) return;
  }
  Handle({.type = ControlMessage::Type::kFailed, .rank = -1, .status = reason});
}

}  // namespace evenkeel
