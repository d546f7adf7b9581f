#include "evenkeel/bucket/reducer/unused_agreement.h"

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/base/clock.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {

absl::StatusOr<std::unique_ptr<UnusedAgreement>> UnusedAgreement::Create(Communicator* comm,
                                                                         absl::string_view reducer,
                                                                         int params) {
  std::unique_ptr<UnusedAgreement> agreement(
      new UnusedAgreement(absl::StrCat(reducer, ".unused"), params));
  if (comm->device().is_cpu()) {
    EK_ASSIGN_OR_RETURN(Memory memory, comm->Allocate(params));
    agreement->flags_ = std::make_shared<Memory>(std::move(memory));
    agreement->view_ = TensorView(agreement->flags_->data.get(), params, DType::kUint8);
  }
  EK_RETURN_IF_ERROR(agreement->ReplaceGroup(comm));
  return agreement;
}

absl::Status UnusedAgreement::ReplaceGroup(Communicator* comm) {
  Forget();
  comm_ = comm;
  if (flags_ == nullptr) return absl::OkStatus();
  EK_ASSIGN_OR_RETURN(channel_, comm->OpenChannel(channel_name_));
  return absl::OkStatus();
}

Collective UnusedAgreement::AllReduce() const {
  return {.kind = CollectiveKind::kAllReduce,
          .dtype = DType::kUint8,
          .count = params_,
          .op = ReduceOp::kMax,
          .role = Role::kState};
}

std::optional<Collective> UnusedAgreement::what() const {
  return flags_ == nullptr ? std::nullopt : std::optional<Collective>(AllReduce());
}

void UnusedAgreement::Begin(absl::Span<const uint8_t> uses, bool contributes, Done done) {
  if (flags_ == nullptr) {
    const std::vector<uint8_t> none(uses.size(), 0);
    work_ = Exchange(contributes ? uses : none, std::move(done));
    return;
  }
  std::memcpy(view_.data, uses.data(), uses.size());
  work_ = channel_->Issue(AllReduce(), {view_}, {view_},
                          {.role = Role::kState, .contributes = contributes});
  work_->OnDone(
      [flags = flags_, count = params_, done = std::move(done)](const absl::Status& status) {
        if (status.ok())
          done({static_cast<const uint8_t*>(static_cast<const void*>(flags->data.get())),
                static_cast<size_t>(count)});
      });
}

Work UnusedAgreement::Exchange(absl::Span<const uint8_t> uses, Done done) {
  const auto state = std::make_shared<WorkState>(
      SteadyNow() + comm_->timeout(), [comm = comm_, name = channel_name_] {
        comm->Abort(absl::DeadlineExceededError(
            absl::StrCat(name, ": not all ranks have reported which parameters they use")));
      });
  comm_->control().Exchange(channel_name_, std::string(uses.begin(), uses.end()),
                            [state, count = static_cast<size_t>(params_), done = std::move(done)](
                                const absl::StatusOr<ControlChannel::Parts>& parts) {
                              if (!parts.ok()) return state->Finish(parts.status());
                              std::vector<uint8_t> used(count, 0);
                              for (const std::string& part : *parts) {
                                if (part.size() != count) {
                                  return state->Finish(absl::InternalError(absl::StrCat(
                                      "a rank reported the use of ", part.size(), " parameters")));
                                }
                                for (size_t i = 0; i < count; ++i)
                                  used[i] = used[i] != 0 || part[i] != 0;
                              }
                              done(used);
                              state->Finish(absl::OkStatus());
                            });
  return Work(state);
}

absl::Status UnusedAgreement::Wait() {
  const absl::Status status = work_->Wait();
  Forget();
  return status;
}

}  // namespace evenkeel
