#include "evenkeel/zero_optim/internal/state_sync.h"

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "evenkeel/comm/base/bytes.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/work.h"
#include "evenkeel/zero_optim/internal/step_message.h"
#include "evenkeel/zero_optim/internal/wait_for_all.h"

namespace evenkeel::internal {

absl::Status StateSync::BroadcastSettings(ParameterUpdater& updater, int source) const {
  const std::string mine =
      comm.rank() == source ? StepMessage{.rules = updater.groups().rules()}.Serialize() : "";
  EK_ASSIGN_OR_RETURN(
      const ControlChannel::Parts parts,
      comm.control().Exchange(absl::StrCat("settings_of/", name), mine, comm.timeout()));
  EK_ASSIGN_OR_RETURN(const StepMessage message, StepMessage::Parse(parts[source], 0));
  return updater.groups().Adopt(message.rules);
}

absl::Status StateSync::BroadcastState(ParameterUpdater& updater, const ParameterSet& params,
                                       int source) const {
  EK_RETURN_IF_ERROR(BroadcastSettings(updater, source));
  EK_RETURN_IF_ERROR(updater.Refresh());
  ByteWriter mine;
  for (int i = 0; i < params.size() && comm.rank() == source; ++i) mine.I64(updater.step(i));
  EK_ASSIGN_OR_RETURN(
      const ControlChannel::Parts parts,
      comm.control().Exchange(absl::StrCat("steps_of/", name), mine.Take(), comm.timeout()));
  ByteReader reader(parts[source]);
  std::vector<Work> works;
  for (int i = 0; i < params.size(); ++i) {
    const int64_t step = reader.I64();
    if (!reader.ok()) return reader.Finish("an optimizer's step counts");
    EK_RETURN_IF_ERROR(updater.Prepare(i, step));
    for (HeldTensor& tensor : updater.tensors(i)) {
      works.push_back(channel.Broadcast(tensor.view(), source,
                                        {.role = Role::kState, .after = updater.stream()}));
    }
  }
  return WaitForAll(works);
}

}  // namespace evenkeel::internal
