// Several hosts in one process, for tests: the hierarchical backend with the local one inside and
// between the hosts.
//
//   auto backends = CreateBackendsOnHosts({"a", "a", "b"});      // one per rank

#ifndef EVENKEEL_COMM_TESTING_HOSTS_H_
#define EVENKEEL_COMM_TESTING_HOSTS_H_

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "evenkeel/comm/backend.h"
#include "evenkeel/comm/communicator.h"

namespace evenkeel::internal {

using Hosts = std::vector<std::string>;  // By rank: the name of its host.

// Made once for each world size: hosts of unequal sizes whose ranks are not contiguous, except for
// two ranks on two hosts.
Hosts SomeHosts(int world_size);

// A look at what goes between the hosts: what is put around the halves of that group. Null:
// nothing.
using Wrap = std::function<std::unique_ptr<Backend>(std::unique_ptr<Backend>)>;

std::vector<std::unique_ptr<Backend>> CreateBackendsOnHosts(const Hosts& hosts,
                                                            const Wrap& wrap_between = nullptr);
std::vector<std::unique_ptr<Communicator>> CreateGroupOver(
    std::vector<std::unique_ptr<Backend>> backends, const CommunicatorOptions& options);
std::vector<std::unique_ptr<Communicator>> CreateGroupOnHosts(const Hosts& hosts,
                                                              const CommunicatorOptions& options);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_TESTING_HOSTS_H_
