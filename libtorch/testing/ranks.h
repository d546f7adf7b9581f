// Runs a function in a process per rank, as a job of libtorch programs on this host.
//
//   EXPECT_EQ(RunRanks(3, [](Group& group) { Require(group.size() == 3, "..."); }), AllPass(3));
//
// Call it before the calling process has used torch: its threads do not survive a fork.

#ifndef EVENKEEL_LIBTORCH_TESTING_RANKS_H_
#define EVENKEEL_LIBTORCH_TESTING_RANKS_H_

#include <functional>
#include <string>
#include <vector>

#include "evenkeel/libtorch.h"

namespace evenkeel::libtorch {

// The output on standard error, if the exit code was not 0: "exit 1: rank 0: ...".
using Endings = std::vector<std::string>;

Endings RunRanks(int world, const std::function<void(Group&)>& body,
                 const GroupOptions& options = {});
inline Endings AllPass(int world) { return Endings(world); }

// Throws unless `holds`.
void Require(bool holds, const std::string& what);
// Throws unless they are equal bit for bit.
void RequireSame(const torch::Tensor& got, const torch::Tensor& want, const std::string& what);
// Throws unless `call` throws an Error whose text has `part`.
void RequireError(const std::function<void()>& call, const std::string& part);
// Throws unless the ranks' parameters and buffers are equal.
void RequireReplicas(Group& group, const torch::nn::Module& module);

}  // namespace evenkeel::libtorch

#endif  // EVENKEEL_LIBTORCH_TESTING_RANKS_H_
