// Groups of evenkeel over a store of c10d.
//
//   StoreAdapter store(c10d_store, rank, "group", "1", {0, 3});
//   abi::CreateGroup(store, OptionsOf(c10d_store, rank, 2, timeout, store.name()), &failure);
//
// Threads: a StoreAdapter is used by one thread at a time.

#ifndef EVENKEEL_PYTHON_EVENKEEL_C10D_STORE_H_
#define EVENKEEL_PYTHON_EVENKEEL_C10D_STORE_H_

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "evenkeel/comm/abi/group.h"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace evenkeel::bridge {

class StoreAdapter : public abi::Store {
 public:
  // Has a connection of its own, so that waiting does not block the caller's store; and a namespace
  // of these members, in order, and of how many groups of them `rank` has made for this purpose,
  // failed ones included. So groups with other members never meet, and keys of a group that was
  // destroyed do not matter when it is made again. The store counts, and not the process, because a
  // rank may be restarted.
  StoreAdapter(const c10::intrusive_ptr<c10d::Store>& store, int rank, const std::string& purpose,
               const std::string& torch_name, const std::vector<uint64_t>& members);

  // Returns the group's name, such as "group [0, 3] #1": equal on all ranks of the group, and on no
  // others. The purpose alone if there are no members.
  const std::string& name() const { return name_; }

  bool Set(const std::string& key, const std::string& value, std::string* error) override;
  bool Get(const std::string& key, std::chrono::milliseconds timeout, std::string* value,
           std::string* error) override;

 private:
  c10::intrusive_ptr<c10d::Store> store_;
  std::string name_;
};

abi::Options OptionsOf(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
                       std::chrono::milliseconds timeout, std::string name);

}  // namespace evenkeel::bridge

#endif  // EVENKEEL_PYTHON_EVENKEEL_C10D_STORE_H_
