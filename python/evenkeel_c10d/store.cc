#include "store.h"

#include <c10/util/hash.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <thread>
#include <utility>

#include "error.h"
#include "evenkeel/comm/base/per_process.h"
#include "torch/csrc/distributed/c10d/PrefixStore.hpp"
#include "torch/csrc/distributed/c10d/TCPStore.hpp"

namespace evenkeel::bridge {
namespace {

constexpr std::chrono::milliseconds kShortWait{1'000};

// For the other ranks to start: importing torch takes seconds, and a short timeout is meant for
// operations.
constexpr std::chrono::milliseconds kLeastConnectTimeout{30'000};

constexpr size_t kLongestList = 60;  // Part of file names, whose length is limited.

using StorePtr = c10::intrusive_ptr<c10d::Store>;

// Returns the store beneath all PrefixStores.
StorePtr BaseOf(const StorePtr& store) {
  auto* prefix = dynamic_cast<c10d::PrefixStore*>(store.get());
  return prefix == nullptr ? store : prefix->getUnderlyingNonPrefixStore();
}

// Returns the host of a TCPStore; empty for other stores.
std::string HostOf(const StorePtr& store) {
  const StorePtr base = BaseOf(store);
  const auto* tcp = dynamic_cast<const c10d::TCPStore*>(base.get());
  return tcp == nullptr ? "" : tcp->getHost();
}

// Gives access to a PrefixStore's prefix.
struct OpenPrefixStore : c10d::PrefixStore {
  static const std::string& PrefixOf(const c10d::PrefixStore& store) {
    return store.*(&OpenPrefixStore::prefix_);
  }
};

// Returns the store beneath the PrefixStore that torch adds for the group of this name. The name
// is, or contains, the number of groups that this process has made, so it differs between ranks
// that make only their own groups.
StorePtr StoreBeneath(const std::string& name, const StorePtr& store) {
  StorePtr beneath = store;
  while (auto* layer = dynamic_cast<c10d::PrefixStore*>(beneath.get())) {
    beneath = layer->getUnderlyingStore();
    if (OpenPrefixStore::PrefixOf(*layer) == name + "/") return beneath;
  }
  return store;
}

// Returns `base` beneath the prefixes of `store`.
StorePtr WithPrefixesOf(const StorePtr& store, const StorePtr& base) {
  auto* layer = dynamic_cast<c10d::PrefixStore*>(store.get());
  if (layer == nullptr) return base;
  return c10::make_intrusive<c10d::PrefixStore>(OpenPrefixStore::PrefixOf(*layer),
                                                WithPrefixesOf(layer->getUnderlyingStore(), base));
}

}  // namespace

// The idle clones of a store: no group is being made with them.
struct StoreClones {
  // Returns the clones of a store, which live as long as a caller keeps them.
  static std::shared_ptr<StoreClones> Of(const StorePtr& base) {
    struct Known {
      std::mutex mutex;
      std::map<c10d::Store*, std::weak_ptr<StoreClones>> by_store;
    };
    static auto* of_process = new internal::PerProcess<Known>;
    Known& known = of_process->Get();
    const std::lock_guard lock(known.mutex);
    std::erase_if(known.by_store, [](const auto& entry) { return entry.second.expired(); });
    std::weak_ptr<StoreClones>& entry = known.by_store[base.get()];
    if (auto living = entry.lock(); living != nullptr) return living;
    auto fresh = std::make_shared<StoreClones>(c10::weak_intrusive_ptr<c10d::Store>(base));
    entry = fresh;
    return fresh;
  }

  explicit StoreClones(c10::weak_intrusive_ptr<c10d::Store> of) : of(std::move(of)) {}

  // Returns an idle clone, or else a new one. If no descriptor is left, returns the store itself: a
  // TCPStore would try for minutes to clone itself, and the other ranks must be informed.
  StorePtr Borrow(const StorePtr& base) {
    {
      const std::lock_guard lock(mutex);
      if (!idle.empty()) {
        StorePtr clone = std::move(idle.back());
        idle.pop_back();
        return clone;
      }
    }
    const int probe = open("/dev/null", O_RDONLY | O_CLOEXEC);
    if (probe < 0) return base;
    close(probe);
    return base->clone();
  }

  const c10::weak_intrusive_ptr<c10d::Store> of;  // Keeps its address from being used again.
  std::mutex mutex;
  std::vector<StorePtr> idle;
};

StoreAdapter::StoreAdapter(const StorePtr& store, int rank, const std::string& purpose,
                           const std::string& torch_name, const std::vector<uint64_t>& members)
    : base_(BaseOf(store)),
      clones_(StoreClones::Of(base_)),
      clone_(clones_->Borrow(base_)),
      store_(WithPrefixesOf(StoreBeneath(torch_name, store), clone_)) {
  std::string list = c10::str(members);
  const std::string hash = c10::sha1(list).str();
  const std::string key = "evenkeel/" + purpose + "/" + hash + "/";
  const std::string count = std::to_string(store_->add(key + "made by " + std::to_string(rank), 1));
  store_ = c10::make_intrusive<c10d::PrefixStore>(key + count, store_);
  if (list.size() > kLongestList) list = list.substr(0, kLongestList) + "... " + hash;
  name_ = members.empty() ? purpose : purpose + " " + list + " #" + count;
}

StoreAdapter::~StoreAdapter() {
  if (has_failed_ || clone_ == base_) return;
  const std::lock_guard lock(clones_->mutex);
  clones_->idle.push_back(std::move(clone_));
}

bool StoreAdapter::Set(const std::string& key, const std::string& value, std::string* error) {
  const bool is_set = Try(error, [&] { store_->set(key, value); });
  has_failed_ |= !is_set;
  return is_set;
}

bool StoreAdapter::Get(const std::string& key, std::chrono::milliseconds timeout,
                       std::string* value, std::string* error) {
  bool is_there = true;
  const bool has_answered = Try(error, [&] {
    // A TCPStore logs two warnings for each wait that times out, and evenkeel looks often.
    if (timeout < kShortWait && !store_->check({key})) {
      std::this_thread::sleep_for(timeout);
      is_there = store_->check({key});
    }
    if (!is_there) return;
    store_->wait({key}, std::max(timeout, kShortWait));
    *value = store_->get_to_str(key);
  });
  has_failed_ |= !has_answered;
  if (!is_there) *error = "the store has no key " + key;
  return is_there && has_answered;
}

abi::Options OptionsOf(const StorePtr& store, int rank, int world_size,
                       std::chrono::milliseconds timeout, std::string name,
                       const std::vector<uint64_t>& members) {
  return {.rank = rank,
          .world_size = world_size,
          .members = std::vector<int>(members.begin(), members.end()),
          .name = std::move(name),
          .route_to = HostOf(store),
          .timeout = timeout,
          .connect_timeout = std::max(timeout, kLeastConnectTimeout)};
}

}  // namespace evenkeel::bridge
