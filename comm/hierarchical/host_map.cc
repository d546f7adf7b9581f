#include "evenkeel/comm/hierarchical/host_map.h"

#include <algorithm>
#include <map>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

namespace evenkeel::internal {

HostMap::HostMap(const std::vector<std::string>& names) {
  std::map<std::string, int> numbers;
  for (size_t rank = 0; rank < names.size(); ++rank) {
    const auto [at, is_new] = numbers.emplace(names[rank], hosts());
    if (is_new) ranks_of_hosts_.emplace_back();
    std::vector<int>& ranks = ranks_of_hosts_[at->second];
    hosts_of_ranks_.push_back(at->second);
    places_.push_back(static_cast<int>(ranks.size()));
    ranks.push_back(static_cast<int>(rank));
    largest_ = std::max(largest_, static_cast<int>(ranks.size()));
  }
}

std::vector<int> HostMap::leaders() const {
  std::vector<int> leaders;
  for (const std::vector<int>& ranks : ranks_of_hosts_) leaders.push_back(ranks.front());
  return leaders;
}

std::string HostMap::Describe() const {
  std::vector<std::string> texts;
  for (int host = 0; host < hosts(); ++host) {
    const std::vector<int>& ranks = ranks_of(host);
    texts.push_back(absl::StrCat("host ", host, " has ", ranks.size() == 1 ? "rank " : "ranks ",
                                 absl::StrJoin(ranks, ",")));
  }
  return absl::StrJoin(texts, "; ");
}

}  // namespace evenkeel::internal
