#include "evenkeel/comm/waiting.h"

#include <algorithm>
#include <utility>
#include <variant>

#include "evenkeel/comm/arith/view_lists.h"
#include "evenkeel/comm/backend.h"
#include "evenkeel/comm/control/control.h"
#include "evenkeel/comm/local/link.h"

namespace evenkeel::internal {
namespace {

// A link to a hub of this process, for one rank that stands for all.
class EchoLink final : public ControlLink {
 public:
  EchoLink(int rank, int world_size)
      : rank_(rank), world_size_(world_size), link_(std::move(CreateLocalLinks(1)[0])) {}
  ~EchoLink() override { Stop(); }

  void Start(std::function<void(ToRank)> receive, std::function<void(absl::Status)> lost) override {
    link_->Start(
        [this, receive = std::move(receive)](ToRank message) {
          if (auto* exchanged = std::get_if<to_rank::Exchanged>(&message))
            exchanged->parts.front().count = world_size_;
          receive(std::move(message));
        },
        std::move(lost));
  }
  void Send(ToHub message) override {
    if (auto* mail = std::get_if<to_hub::Message>(&message)) {
      const bool is_for_me = std::ranges::find(mail->to, rank_) != mail->to.end();
      mail->to.assign(is_for_me ? 1 : 0, 0);
    }
    link_->Send(std::move(message));
  }
  absl::StatusOr<std::unique_ptr<ControlLink>> Open(absl::string_view group, int, int,
                                                    absl::Duration, const Origin&) override {
    return absl::FailedPreconditionError(
        absl::StrCat("the group ", group, ": this process waits for the place of rank ", rank_,
                     ", and can make groups when it has entered (join/recovery.h)"));
  }
  std::string Key(absl::string_view purpose) const override { return link_->Key(purpose); }
  ControlCounters Counters() const override { return link_->Counters(); }
  void Stop() override { link_->Stop(); }

 private:
  const int rank_;
  const int world_size_;
  const std::unique_ptr<ControlLink> link_;
};

class EchoBackend final : public Backend {
 public:
  EchoBackend(int world_size, decltype(WaitingOptions::allocate) allocate)
      : world_size_(world_size), allocate_(std::move(allocate)) {}

  absl::string_view name() const override { return "waiting"; }
  void Start(Operation operation, std::shared_ptr<WorkState> work) override {
    if (operation.what.kind == CollectiveKind::kAllGather) {
      const int64_t count = operation.what.count;
      for (int rank = 0; rank < world_size_; ++rank)
        CopyRange(operation.in, 0, operation.out, rank * count, count);
    }
    work->Finish(absl::OkStatus());
  }
  void Abort(const absl::Status&) override {}
  absl::StatusOr<Memory> Allocate(int64_t bytes) override {
    return allocate_ == nullptr ? Backend::Allocate(bytes) : allocate_(bytes);
  }

 private:
  const int world_size_;
  const decltype(WaitingOptions::allocate) allocate_;
};

}  // namespace

std::unique_ptr<Communicator> MakeWaiting(int rank, int world_size, WaitingOptions options) {
  options.communicator.flight.folder.clear();  // It has the record of the rank that was lost.
  return std::make_unique<Communicator>(
      std::make_unique<EchoBackend>(world_size, std::move(options.allocate)),
      std::make_unique<ControlChannel>(rank, world_size,
                                       std::make_unique<EchoLink>(rank, world_size)),
      std::move(options.communicator), options.group, std::move(options.make_group),
      std::move(options.open_link));
}

}  // namespace evenkeel::internal
