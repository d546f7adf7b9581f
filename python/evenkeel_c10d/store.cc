#include "store.h"

#include <c10/util/hash.h>

#include <algorithm>
#include <thread>
#include <utility>

#include "torch/csrc/distributed/c10d/PrefixStore.hpp"
#include "torch/csrc/distributed/c10d/TCPStore.hpp"

namespace evenkeel::bridge {
namespace {

constexpr std::chrono::milliseconds kShortWait{1'000};

// For the other ranks to start: importing torch takes seconds, and a short timeout is meant for
// operations.
constexpr std::chrono::milliseconds kLeastConnectTimeout{30'000};

constexpr size_t kLongestList = 60;  // Names of files have it.

template <typename Function>
bool Try(std::string* error, Function function) {
  try {
    function();
    return true;
  } catch (const c10::Error& caught) {
    *error = caught.what_without_backtrace();
  } catch (const std::exception& caught) {
    *error = caught.what();
  }
  return false;
}

// Returns the host of a TCPStore, also beneath PrefixStores; empty for other stores.
std::string HostOf(const c10::intrusive_ptr<c10d::Store>& store) {
  c10::intrusive_ptr<c10d::Store> base = store;
  if (auto* prefix = dynamic_cast<c10d::PrefixStore*>(base.get())) {
    base = prefix->getUnderlyingNonPrefixStore();
  }
  const auto* tcp = dynamic_cast<const c10d::TCPStore*>(base.get());
  return tcp == nullptr ? "" : tcp->getHost();
}

// Gives access to a PrefixStore's prefix.
struct OpenPrefixStore : c10d::PrefixStore {
  static const std::string& PrefixOf(const c10d::PrefixStore& store) {
    return store.*(&OpenPrefixStore::prefix_);
  }
};

// Returns the store beneath what torch puts around it for the group of this name. The name is the
// number of groups that this process has made, or has it in itself, and differs between ranks that
// make only the groups that they are in.
c10::intrusive_ptr<c10d::Store> StoreBeneath(const std::string& name,
                                             const c10::intrusive_ptr<c10d::Store>& store) {
  c10::intrusive_ptr<c10d::Store> beneath = store;
  while (auto* layer = dynamic_cast<c10d::PrefixStore*>(beneath.get())) {
    beneath = layer->getUnderlyingStore();
    if (OpenPrefixStore::PrefixOf(*layer) == name + "/") return beneath;
  }
  return store;
}

}  // namespace

StoreAdapter::StoreAdapter(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                           const std::string& purpose, const std::string& torch_name,
                           const std::vector<uint64_t>& members)
    : store_(StoreBeneath(torch_name, store)->clone()) {
  std::string list = c10::str(members);
  const std::string hash = c10::sha1(list).str();
  const std::string key = "evenkeel/" + purpose + "/" + hash + "/";
  const std::string count = std::to_string(store_->add(key + "made by " + std::to_string(rank), 1));
  store_ = c10::make_intrusive<c10d::PrefixStore>(key + count, store_);
  if (list.size() > kLongestList) list = list.substr(0, kLongestList) + "... " + hash;
  name_ = members.empty() ? purpose : purpose + " " + list + " #" + count;
}

bool StoreAdapter::Set(const std::string& key, const std::string& value, std::string* error) {
  return Try(error, [&] { store_->set(key, value); });
}

bool StoreAdapter::Get(const std::string& key, std::chrono::milliseconds timeout,
                       std::string* value, std::string* error) {
  return Try(error, [&] {
    // A TCPStore logs two warnings for each wait that times out, and evenkeel looks often.
    if (timeout < kShortWait && !store_->check({key})) {
      std::this_thread::sleep_for(timeout);
      TORCH_CHECK(store_->check({key}), "the store has no key ", key);
    }
    store_->wait({key}, std::max(timeout, kShortWait));
    *value = store_->get_to_str(key);
  });
}

abi::Options OptionsOf(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
                       std::chrono::milliseconds timeout, std::string name) {
  return {.rank = rank,
          .world_size = world_size,
          .name = std::move(name),
          .route_to = HostOf(store),
          .timeout = timeout,
          .connect_timeout = std::max(timeout, kLeastConnectTimeout)};
}

}  // namespace evenkeel::bridge
