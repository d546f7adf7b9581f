// A rank of shm_faults_test, as a process. It says one line for each thing that happens, and is
// told when to go on.
//
//   RunShmRank({"stopped", "all_reduce", "16777216"})
//
//   stopped KIND ELEMENTS   goes on with one collective over registered memory until the group
//     fails; fills its memory
//                           with a pattern; once it is told to, says whether that is still there.
//   killed SEED             goes on with collectives of all kinds until the group fails, and then
//                           with who is left.
//   no_files WHAT           rank 1 has no file descriptors left: to "allocate", for new "channels",
//                           for what others "give".

#ifndef EVENKEEL_TESTS_SHM_FAULTS_RANK_H_
#define EVENKEEL_TESTS_SHM_FAULTS_RANK_H_

#include <string>
#include <vector>

#include "absl/status/status.h"

namespace evenkeel {

absl::Status RunShmRank(const std::vector<std::string>& arguments);

}  // namespace evenkeel

#endif  // EVENKEEL_TESTS_SHM_FAULTS_RANK_H_
