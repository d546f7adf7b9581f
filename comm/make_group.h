// The common part of the backends' Create...Group() functions: makes a communicator, connects its
// ranks over its control plane, and gives it the function that makes the groups of its splits.
//
//   return internal::MakeGroup("CreateShmGroup", rank, world_size, std::move(control), options,
//                              CreateShmGroup, std::move(backend), connect);
//
// Errors: InvalidArgument for a rank that is out of range; those of `connect`, which end the group.

#ifndef EVENKEEL_COMM_MAKE_GROUP_H_
#define EVENKEEL_COMM_MAKE_GROUP_H_

#include <memory>
#include <string>
#include <type_traits>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/control/control.h"
#include "evenkeel/comm/control/link.h"
#include "evenkeel/comm/status.h"

namespace evenkeel::internal {

// `caller`: the name of `create`, for errors.
template <class Backend, class Options>
absl::StatusOr<std::unique_ptr<Communicator>> MakeGroup(
    absl::string_view caller, int rank, int world_size, std::unique_ptr<ControlLink> control,
    const Options& options,
    absl::StatusOr<std::unique_ptr<Communicator>> (*create)(int, int, std::unique_ptr<ControlLink>,
                                                            const Options&),
    std::unique_ptr<Backend> owner,
    absl::FunctionRef<absl::Status(std::type_identity_t<Backend>&, Communicator&,
                                   const std::type_identity_t<Options>&)>
        connect) {
  if (world_size < 1 || rank < 0 || rank >= world_size) {
    return absl::InvalidArgumentError(
        absl::StrCat(caller, ": rank ", rank, " is out of range for ", world_size, " ranks"));
  }
  Backend& backend = *owner;
  // Made before the ranks are connected, so that a rank that is lost meanwhile ends the wait.
  auto comm = std::make_unique<Communicator>(
      std::move(owner), std::make_unique<ControlChannel>(rank, world_size, std::move(control)),
      options.communicator, options.group,
      [options, create](absl::string_view group, int next_rank, int next_world_size,
                        std::unique_ptr<ControlLink> link, absl::Duration timeout) {
        Options next = options;
        next.group = std::string(group);
        next.connect_timeout = timeout;
        return create(next_rank, next_world_size, std::move(link), next);
      });
  const absl::Status status = connect(backend, *comm, options);
  if (status.ok()) return comm;
  comm->Abort(status);
  return Annotate(comm->status(), absl::StrCat("group ", options.group));
}

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_MAKE_GROUP_H_
