// Whether all ranks made the same optimizer, asked once when it is made.
//
//   EK_RETURN_IF_ERROR(CheckSameOnAllRanks(comm, "optimizer#0", updater.Check(), params, rule));
//
// Every rank must call it. All ranks get the same answer: InvalidArgument that names the ranks and the first parameter
// or setting that differs, or the first rank whose `own` status is not OK with that status.

#ifndef EVENKEEL_ZERO_OPTIM_INTERNAL_AGREE_H_
#define EVENKEEL_ZERO_OPTIM_INTERNAL_AGREE_H_

#include <string>

#include "absl/status/status.h"
#include "evenkeel/bucket/parameter_set.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/zero_optim/update_rule.h"

namespace evenkeel::internal {

absl::Status CheckSameOnAllRanks(Communicator& comm, const std::string& name, const absl::Status& own,
                                 const ParameterSet& params, const UpdateRule& rule);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_ZERO_OPTIM_INTERNAL_AGREE_H_
