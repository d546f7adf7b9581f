// Which ranks of a group share a host.
//
//   HostMap map({"a", "b", "a"});     // by rank: ranks 0 and 2 on one host, rank 1 on another
//   map.host_of(2);                   // 0: hosts are numbered in the order of their lowest ranks
//   map.place_of(2);                  // 1: the second one there
//   map.ranks_of(0);                  // {0, 2}; the first one leads the host
//
// Threads: immutable.

#ifndef EVENKEEL_COMM_HIERARCHICAL_HOST_MAP_H_
#define EVENKEEL_COMM_HIERARCHICAL_HOST_MAP_H_

#include <string>
#include <vector>

namespace evenkeel::internal {

class HostMap {
 public:
  // The identifier of each rank's host; for at least one rank.
  explicit HostMap(const std::vector<std::string>& names);

  int ranks() const { return static_cast<int>(hosts_of_ranks_.size()); }
  int hosts() const { return static_cast<int>(ranks_of_hosts_.size()); }
  int host_of(int rank) const { return hosts_of_ranks_[rank]; }
  int place_of(int rank) const { return places_[rank]; }
  const std::vector<int>& ranks_of(int host) const { return ranks_of_hosts_[host]; }  // Ascending.
  int leader_of(int host) const { return ranks_of_hosts_[host].front(); }
  std::vector<int> leaders() const;  // By host.
  // Returns the largest number of ranks on a host.
  int largest() const { return largest_; }

  // "host 0 has ranks 0,2; host 1 has rank 1"
  std::string Describe() const;

 private:
  std::vector<int> hosts_of_ranks_;
  std::vector<int> places_;
  std::vector<std::vector<int>> ranks_of_hosts_;
  int largest_ = 0;
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_HIERARCHICAL_HOST_MAP_H_
