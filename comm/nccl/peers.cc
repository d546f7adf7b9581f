#include "evenkeel/comm/nccl/peers.h"

#include <map>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "evenkeel/comm/ranks/parties.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/types.h"

namespace evenkeel::internal {
namespace {

absl::Status CheckVersions(const std::vector<NcclPeer>& peers) {
  Parties versions;
  bool differ = false;
  for (size_t rank = 0; rank < peers.size(); ++rank) {
    versions[static_cast<int>(rank)] = NcclVersionText(peers[rank].version);
    differ = differ || peers[rank].version != peers[0].version;
  }
  if (!differ) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      "the version of NCCL: ", Describe(versions, "has", "have"), ": the ranks need the same one"));
}

absl::Status CheckDevices(const std::vector<NcclPeer>& peers) {
  std::map<std::pair<std::string, std::string>, int> ranks;  // By host and device: the lowest.
  for (size_t rank = 0; rank < peers.size(); ++rank) {
    const NcclPeer& peer = peers[rank];
    if (peer.place.may_share_device) continue;
    const auto [first, is_new] =
        ranks.emplace(std::make_pair(peer.place.host, peer.place.device), static_cast<int>(rank));
    if (is_new) continue;
    const int theirs = peers[first->second].device;
    return absl::FailedPreconditionError(absl::StrCat(
        "ranks ", first->second, " and ", rank, " are on one device, ", peer.place.device, " of ",
        peer.place.host, " (", ToString(Device::Cuda(theirs)),
        theirs == peer.device ? "" : absl::StrCat(" and ", ToString(Device::Cuda(peer.device))),
        "): NCCL needs one for each rank; start no more ranks on a host than it has devices"));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status CheckPeers(const std::vector<NcclPeer>& peers) {
  EK_RETURN_IF_ERROR(CheckVersions(peers));
  return CheckDevices(peers);
}

}  // namespace evenkeel::internal
