#include "evenkeel/tools/measure/rounds.h"

#include "evenkeel/comm/status.h"

namespace evenkeel {

absl::Status RunRounds(size_t cases, int rounds,
                       absl::FunctionRef<absl::Status(size_t index, int round)> run) {
  for (int round = 0; round < rounds; ++round) {
    for (size_t i = 0; i < cases; ++i) {
      const size_t turn = round % 2 == 0 ? i : cases - 1 - i;
      EK_RETURN_IF_ERROR(run((turn + static_cast<size_t>(round / 2)) % cases, round));
    }
  }
  return absl::OkStatus();
}

}  // namespace evenkeel
