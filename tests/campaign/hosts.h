// Two hosts for the ranks of a job: network namespaces with a bridge between them
// (tests/hosts/network.sh).
//
//   EK_ASSIGN_OR_RETURN(std::unique_ptr<HostNetwork> hosts,
//   HostNetwork::Make("tests/hosts/network.sh"));
//   // This process, and what it starts, is on host 0; a rank of host 1:
//   children.Start(hosts->CommandOn(1, {"train"}), {{"EVENKEEL_ADDRESS", hosts->AddressOf(1)}});
//
// Threads: call it from the main thread; threads started later are on host 0, too.
// Errors:  PermissionDenied where no namespaces can be made: they need root.

#ifndef EVENKEEL_TESTS_CAMPAIGN_HOSTS_H_
#define EVENKEEL_TESTS_CAMPAIGN_HOSTS_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace evenkeel {

class HostNetwork {
 public:
  static constexpr int kHosts = 2;

  static absl::StatusOr<std::unique_ptr<HostNetwork>> Make(const std::string& script);
  ~HostNetwork();
  HostNetwork(const HostNetwork&) = delete;
  HostNetwork& operator=(const HostNetwork&) = delete;

  std::string AddressOf(int host) const;
  std::vector<std::string> CommandOn(int host, std::vector<std::string> command) const;

 private:
  HostNetwork(std::string script, std::string id, int before)
      : script_(std::move(script)), id_(std::move(id)), before_(before) {}

  const std::string script_, id_;
  const int before_;  // The namespace of this process before.
};

}  // namespace evenkeel

#endif  // EVENKEEL_TESTS_CAMPAIGN_HOSTS_H_
