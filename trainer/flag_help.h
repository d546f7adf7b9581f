// Help that a person can read: our own flags in groups, a line each, instead of everything that gflags knows.
//
//   std::cout << FlagHelp({{"Data", {"data", "shuffle"}}, {"Optimizer", {"lr"}}});
//
//   Data:
//     --data=TEXT     folder with IDX files (default /usr/share/datasets/fashion-mnist)
//     --[no]shuffle       another order in each epoch (default on)
//
// A flag's description says it all in itself; "(default ...)" is added unless the description mentions a default. What
// begins with "=X " names the value: "=K of K ranks" shows as --flag=K.
//
// Threads: pure, once flags are defined.

#ifndef EVENKEEL_TRAINER_FLAG_HELP_H_
#define EVENKEEL_TRAINER_FLAG_HELP_H_

#include <span>
#include <string>
#include <vector>

namespace evenkeel {

struct FlagGroup {
  std::string title;
  std::vector<std::string> flags;  // By name; each is defined somewhere in this program.
};

std::string FlagHelp(std::span<const FlagGroup> groups);

}  // namespace evenkeel

#endif  // EVENKEEL_TRAINER_FLAG_HELP_H_
