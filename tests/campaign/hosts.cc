#include "evenkeel/tests/campaign/hosts.h"

#include <fcntl.h>
#include <sched.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <iostream>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace evenkeel {
namespace {

absl::Status MoveTo(int name_space) {
  if (name_space >= 0 && setns(name_space, CLONE_NEWNET) == 0) return absl::OkStatus();
  return absl::PermissionDeniedError(
      absl::StrCat("cannot enter a network namespace: ", std::strerror(errno)));
}

}  // namespace

absl::StatusOr<std::unique_ptr<HostNetwork>> HostNetwork::Make(const std::string& script) {
  const std::string id = absl::StrCat("ec", getpid());
  const int before = open("/proc/self/ns/net", O_RDONLY | O_CLOEXEC);
  const std::string up = absl::StrCat(script, " up ", id, " ", kHosts, " none >&2");
  if (std::system(up.c_str()) != 0) {
    close(before);
    return absl::PermissionDeniedError(
        "hosts are network namespaces, which cannot be made here: run as root");
  }
  std::unique_ptr<HostNetwork> hosts(new HostNetwork(script, id, before));
  const int first = open(absl::StrCat("/run/netns/", id, "-0").c_str(), O_RDONLY | O_CLOEXEC);
  const absl::Status moved = MoveTo(first);
  close(first);
  if (!moved.ok()) return moved;
  return hosts;
}

HostNetwork::~HostNetwork() {
  if (const absl::Status back = MoveTo(before_); !back.ok()) std::cerr << back << "\n";
  close(before_);
  const std::string down = absl::StrCat(script_, " down ", id_, " ", kHosts);
  if (std::system(down.c_str()) != 0) std::cerr << "failed: " << down << "\n";
}

std::string HostNetwork::AddressOf(int host) const { return absl::StrCat("10.213.8.", host + 1); }

std::vector<std::string> HostNetwork::CommandOn(int host, std::vector<std::string> command) const {
  if (host == 0) return command;
  const std::vector<std::string> enter = {"/usr/bin/env", "ip", "netns", "exec",
                                          absl::StrCat(id_, "-", host)};
  command.insert(command.begin(), enter.begin(), enter.end());
  return command;
}

}  // namespace evenkeel
