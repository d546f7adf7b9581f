// Groups of evenkeel over a store of c10d.
//
//   StoreAdapter store(c10d_store, rank, "ranks", "1", {0, 3});
//   const abi::Options options = OptionsOf(c10d_store, rank, 2, timeout, store.name(), {0, 3});
//   abi::CreateGroup(store, options, &failure);
//
// Threads: a StoreAdapter is used by one thread at a time.

#ifndef EVENKEEL_PYTHON_EVENKEEL_C10D_STORE_H_
#define EVENKEEL_PYTHON_EVENKEEL_C10D_STORE_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "evenkeel/comm/abi/group.h"
#include "torch/csrc/distributed/c10d/Store.hpp"

namespace evenkeel::bridge {

struct StoreClones;

class StoreAdapter : public abi::Store {
 public:
  // Uses a clone of the store, so that waiting does not block the caller's. Its keys lie in a
  // namespace that is made of the purpose, the members in order, and the number of groups of these
  // members that `rank` has made for this purpose, failed ones included. So groups with other
  // members never meet, and keys of a group that was destroyed do not matter when it is made again.
  // The store counts the groups, not the process, because a rank may be restarted.
  StoreAdapter(const c10::intrusive_ptr<c10d::Store>& store, int rank, const std::string& purpose,
               const std::string& torch_name, const std::vector<uint64_t>& members);
  ~StoreAdapter() override;

  // Returns the group's name, such as "ranks 0 3 #1": equal on all ranks of the group, and on no
  // others. The purpose alone if there are no members.
  const std::string& name() const { return name_; }

  // Returns the store's clones. While a caller keeps them, later groups over this store use them
  // again. A new clone costs a descriptor, and about every fourteenth one makes the server of a
  // TCPStore wait for 5 s.
  std::shared_ptr<StoreClones> clones() const { return clones_; }

  bool Set(const std::string& key, const std::string& value, std::string* error) override;
  bool Get(const std::string& key, std::chrono::milliseconds timeout, std::string* value,
           std::string* error) override;

 private:
  const c10::intrusive_ptr<c10d::Store> base_;
  const std::shared_ptr<StoreClones> clones_;
  c10::intrusive_ptr<c10d::Store> clone_;  // A clone of the base, or itself.
  bool has_failed_ = false;                // True: a late reply may confuse the clone's next user.
  c10::intrusive_ptr<c10d::Store> store_;  // The clone's namespace for this group.
  std::string name_;
};

abi::Options OptionsOf(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
                       std::chrono::milliseconds timeout, std::string name,
                       const std::vector<uint64_t>& members);

}  // namespace evenkeel::bridge

#endif  // EVENKEEL_PYTHON_EVENKEEL_C10D_STORE_H_
