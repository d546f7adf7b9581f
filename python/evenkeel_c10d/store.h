// Groups of evenkeel over a store of c10d.
//
//   StoreAdapter store(c10d_store, rank);
//   abi::CreateGroup(store, OptionsOf(c10d_store, rank, world_size, timeout, "world"), &failure);
//
// Threads: a StoreAdapter is used by one thread at a time.

#ifndef EVENKEEL_PYTHON_EVENKEEL_C10D_STORE_H_
#define EVENKEEL_PYTHON_EVENKEEL_C10D_STORE_H_

#include <chrono>
#include <string>

#include "evenkeel/comm/abi/group.h"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace evenkeel::bridge {

class StoreAdapter : public abi::Store {
 public:
  // Has a connection of its own, so that waiting does not block the caller's store; and the next
  // namespace: keys of a group that was destroyed are still in the store when it is made again. The
  // store counts them, by rank, and not the process, because a rank may be restarted.
  StoreAdapter(const c10::intrusive_ptr<c10d::Store>& store, int rank);

  bool Set(const std::string& key, const std::string& value, std::string* error) override;
  bool Get(const std::string& key, std::chrono::milliseconds timeout, std::string* value,
           std::string* error) override;

 private:
  c10::intrusive_ptr<c10d::Store> store_;
};

abi::Options OptionsOf(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
                       std::chrono::milliseconds timeout, std::string name);

}  // namespace evenkeel::bridge

#endif  // EVENKEEL_PYTHON_EVENKEEL_C10D_STORE_H_
