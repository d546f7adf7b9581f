#include "evenkeel/bucket/internal/unused_agreement.h"

#include <cstring>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {

absl::StatusOr<std::unique_ptr<UnusedAgreement>> UnusedAgreement::Create(Communicator* comm, absl::string_view reducer,
                                                                         int params) {
  std::unique_ptr<UnusedAgreement> agreement(new UnusedAgreement(absl::StrCat(reducer, ".unused"), params));
  EK_ASSIGN_OR_RETURN(Memory memory, comm->Allocate(params));
  agreement->flags_ = std::make_shared<Memory>(std::move(memory));
  agreement->view_ = TensorView(agreement->flags_->data.get(), params, DType::kUint8, comm->device());
  EK_RETURN_IF_ERROR(agreement->ReplaceGroup(comm));
  return agreement;
}

absl::Status UnusedAgreement::ReplaceGroup(Communicator* comm) {
  Forget();
  EK_ASSIGN_OR_RETURN(channel_, comm->OpenChannel(channel_name_));
  return absl::OkStatus();
}

Collective UnusedAgreement::what() const {
  return {.kind = CollectiveKind::kAllReduce,
          .dtype = DType::kUint8,
          .count = params_,
          .op = ReduceOp::kMax,
          .role = Role::kState};
}

void UnusedAgreement::Begin(absl::Span<const uint8_t> uses, bool contributes,
                            std::function<void(absl::Span<const uint8_t>)> done) {
  std::memcpy(view_.data, uses.data(), uses.size());
  work_ = channel_->Issue(what(), {view_}, {view_}, {.role = Role::kState, .contributes = contributes});
  work_->OnDone([flags = flags_, count = params_, done = std::move(done)](const absl::Status& status) {
    if (status.ok())
      done({static_cast<const uint8_t*>(static_cast<const void*>(flags->data.get())), static_cast<size_t>(count)});
  });
}

absl::Status UnusedAgreement::Wait() {
  const absl::Status status = work_->Wait();
  Forget();
  return status;
}

}  // namespace evenkeel
