#include "store.h"

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

}  // namespace

StoreAdapter::StoreAdapter(const c10::intrusive_ptr<c10d::Store>& store, int rank)
    : store_(store->clone()) {
  const int64_t count = store_->add("evenkeel/count/" + std::to_string(rank), 1);
  store_ = c10::make_intrusive<c10d::PrefixStore>("evenkeel/" + std::to_string(count), store_);
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
