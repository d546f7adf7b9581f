#include "evenkeel/comm/shm/shm.h"

#include <unistd.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "evenkeel/comm/control/arrival.h"
#include "evenkeel/comm/local/run_group.h"
#include "evenkeel/comm/make_group.h"
#include "evenkeel/comm/ranks/parties.h"
#include "evenkeel/comm/shm/backend.h"
#include "evenkeel/comm/shm/mesh.h"
#include "evenkeel/comm/status.h"

namespace evenkeel {
namespace {

constexpr char kTopic[] = "shm addresses";

std::string HostName() {
  char name[256] = {};
  return gethostname(name, sizeof(name) - 1) == 0 ? name : "unknown";
}

// Each rank's message to all others: whose memory it can share, the host's name, and an address.
struct Card {
  std::string identity;
  std::string host;
  std::string address;
};

absl::StatusOr<Card> ParseCard(absl::string_view text) {
  const std::vector<std::string> fields = absl::StrSplit(text, '\n');
  if (fields.size() != 3)
    return absl::InternalError("a rank's address in shared memory is malformed");
  return Card{fields[0], fields[1], fields[2]};
}

absl::Status Connect(internal::ShmBackend& backend, Communicator& comm, const ShmOptions& options) {
  if (comm.world_size() == 1) return backend.Connect({}, options.connect_timeout);
  ControlChannel& control = comm.control();
  EK_ASSIGN_OR_RETURN(const std::string identity, internal::HostIdentity());
  EK_ASSIGN_OR_RETURN(const std::string address,
                      backend.Listen(control.link().Key(absl::StrCat("shm/", options.group))));
  EK_ASSIGN_OR_RETURN(
      const ControlChannel::Parts all,
      internal::AwaitArrival(
          control, kTopic, absl::StrCat(identity, "\n", HostName(), "\n", address),
          {options.group, options.connect_timeout, options.communicator.watch.warn}));
  internal::Parties hosts;
  std::vector<std::string> addresses;
  bool is_one_host = true;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    EK_ASSIGN_OR_RETURN(Card card, ParseCard(all[rank]));
    is_one_host = is_one_host && card.identity == identity;
    hosts[static_cast<int>(rank)] = absl::StrCat(card.host, " (", card.identity, ")");
    addresses.push_back(std::move(card.address));
  }
  if (!is_one_host) {
    return absl::InvalidArgumentError(
        absl::StrCat("backend shm is for ranks that can share memory: ",
                     internal::Describe(hosts, "is on", "are on"), "; choose auto or tcp"));
  }
  return backend.Connect(addresses, options.connect_timeout);
}

}  // namespace

absl::StatusOr<std::unique_ptr<Communicator>> CreateShmGroup(int rank, int world_size,
                                                             std::unique_ptr<ControlLink> control,
                                                             const ShmOptions& options) {
  return internal::MakeGroup(
      "CreateShmGroup", rank, world_size, std::move(control), options, CreateShmGroup,
      std::make_unique<internal::ShmBackend>(rank, world_size, options.group), Connect);
}

absl::StatusOr<std::vector<std::unique_ptr<Communicator>>> CreateShmGroupInProcess(
    int world_size, const CommunicatorOptions& options) {
  return internal::CreateInProcess(
      "CreateShmGroupInProcess", world_size, [&](int rank, std::unique_ptr<ControlLink> link) {
        return CreateShmGroup(rank, world_size, std::move(link), {.communicator = options});
      });
}

}  // namespace evenkeel
