#include "evenkeel/tests/hostile/listeners.h"

#include <arpa/inet.h>
#include <dirent.h>
#include <netinet/in.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <tuple>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace evenkeel {
namespace {

constexpr char kListens[] = "0A";  // TCP_LISTEN, as the kernel prints it.

struct DirectoryCloser {
  void operator()(DIR* directory) const { closedir(directory); }
};

// The inodes of the sockets that a process has open.
void AddSocketsOf(pid_t pid, std::set<std::string>& inodes) {
  const std::string folder = absl::StrCat("/proc/", pid, "/fd");
  const std::unique_ptr<DIR, DirectoryCloser> directory(opendir(folder.c_str()));
  if (directory == nullptr) return;
  constexpr absl::string_view kPrefix = "socket:[";
  while (const dirent* entry = readdir(directory.get())) {
    char target[256];
    const ssize_t size =
        readlink(absl::StrCat(folder, "/", entry->d_name).c_str(), target, sizeof(target));
    if (size <= 0) continue;
    absl::string_view link(target, static_cast<size_t>(size));
    if (!absl::StartsWith(link, kPrefix)) continue;
    link.remove_prefix(kPrefix.size());
    inodes.insert(std::string(link.substr(0, link.find(']'))));
  }
}

// "0100007F:1F90" is 127.0.0.1:8080: words as they lie in memory, then the port.
internal::HostPort AddressOf(const std::string& text) {
  const size_t colon = text.find(':');
  const std::string words = text.substr(0, colon);
  unsigned char bytes[16] = {};
  for (size_t word = 0; 8 * word < words.size() && word < 4; ++word) {
    const uint32_t value =
        static_cast<uint32_t>(std::strtoul(words.substr(8 * word, 8).c_str(), nullptr, 16));
    std::memcpy(bytes + 4 * word, &value, 4);
  }
  char host[INET6_ADDRSTRLEN] = "";
  inet_ntop(words.size() == 8 ? AF_INET : AF_INET6, bytes, host, sizeof(host));
  return {host, static_cast<int>(std::strtoul(text.c_str() + colon + 1, nullptr, 16))};
}

}  // namespace

std::vector<internal::HostPort> ListenersOf(const std::vector<pid_t>& pids) {
  std::set<std::string> inodes;
  for (const pid_t pid : pids) AddSocketsOf(pid, inodes);
  std::vector<internal::HostPort> found;
  for (const char* table : {"/proc/net/tcp", "/proc/net/tcp6"}) {
    std::ifstream lines(table);
    for (std::string line; std::getline(lines, line);) {
      std::istringstream words(line);
      std::string slot, local, remote, state, queues, timer, retransmits, user, timeout, inode;
      words >> slot >> local >> remote >> state >> queues >> timer >> retransmits >> user >>
          timeout >> inode;
      if (state == kListens && inodes.contains(inode)) found.push_back(AddressOf(local));
    }
  }
  std::sort(found.begin(), found.end(), [](const auto& a, const auto& b) {
    return std::tie(a.host, a.port) < std::tie(b.host, b.port);
  });
  found.erase(std::unique(found.begin(), found.end()), found.end());
  return found;
}

std::vector<Holdings> HoldingsOf(const std::vector<pid_t>& pids) {
  const auto entries = [](pid_t pid, absl::string_view folder) {
    const std::unique_ptr<DIR, DirectoryCloser> directory(
        opendir(absl::StrCat("/proc/", pid, "/", folder).c_str()));
    int count = 0;
    while (directory != nullptr && readdir(directory.get()) != nullptr) ++count;
    return count;
  };
  std::vector<Holdings> holdings;
  for (const pid_t pid : pids) holdings.push_back({entries(pid, "fd"), entries(pid, "task")});
  return holdings;
}

int64_t ResidentBytesOf(pid_t pid) {
  std::ifstream words(absl::StrCat("/proc/", pid, "/statm"));
  int64_t all = 0, resident = 0;
  words >> all >> resident;
  return resident * sysconf(_SC_PAGESIZE);
}

}  // namespace evenkeel
