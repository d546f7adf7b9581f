#include "evenkeel/tests/simulation/loss.h"

#include <algorithm>
#include <memory>
#include <utility>

namespace evenkeel::simulation {
namespace {

constexpr Nanos kWhile = 4 * kSecond;

void StopForAWhile(Host* host, World& world) {
  // First: Stop() returns later if a thread of the host calls it.
  world.At(world.now() + kWhile, [&world, host] { world.Continue(host); });
  world.Stop(host);
}

bool IsOfNetwork(LossKind kind) {
  return kind == LossKind::kIsolated || kind == LossKind::kDeaf || kind == LossKind::kMute ||
         kind == LossKind::kIsolatedForAWhile;
}

// Returns the kind of loss that a rank can have on its machine.
LossKind Possible(LossKind kind, const Host& host, const World& world) {
  const bool has_network = std::any_of(world.hosts().begin(), world.hosts().end(),
                                       [&](const auto& h) { return h->machine != host.machine; });
  if (!IsOfNetwork(kind) || has_network) return kind;
  if (kind == LossKind::kMute) return LossKind::kKilled;
  return kind == LossKind::kIsolatedForAWhile ? LossKind::kStoppedForAWhile : LossKind::kStopped;
}

}  // namespace

absl::string_view TextOf(LossKind kind) {
  constexpr const char* kTexts[kLossKinds] = {"is killed",
                                              "is stopped",
                                              "is cut off",
                                              "is deaf",
                                              "is mute",
                                              "is cut off for 4 s",
                                              "is stopped for 4 s",
                                              "runs, but the store is stopped for 4 s"};
  return kTexts[static_cast<int>(kind)];
}

std::set<int> LostRanks(LossKind kind, int rank, const Stage& stage) {
  const Host& host = *stage.ranks[rank];
  if (!IsOfNetwork(Possible(kind, host, stage.world))) return {rank};
  std::set<int> lost;
  for (int other = 0; other < static_cast<int>(stage.ranks.size()); ++other) {
    if (stage.ranks[other]->machine == host.machine) lost.insert(other);
  }
  return lost;
}

void Inflict(LossKind kind, int rank, Stage& stage) {
  World& world = stage.world;
  Network& network = stage.network;
  Host* const host = stage.ranks[rank];
  kind = Possible(kind, *host, world);
  if (kind == LossKind::kKilled) return world.Kill(host);
  if (kind == LossKind::kStopped) return world.Stop(host);
  if (kind == LossKind::kStoppedForAWhile) return StopForAWhile(host, world);
  if (kind == LossKind::kStoreStoppedForAWhile) return StopForAWhile(stage.store, world);
  const auto cut = [&world, &network, kind](Host* from, Host* to) {
    network.CutOneWay(from, to);
    if (kind != LossKind::kIsolatedForAWhile) return;
    world.At(world.now() + kWhile, [&network, from, to] { network.HealOneWay(from, to); });
  };
  for (const std::unique_ptr<Host>& here : world.hosts()) {
    for (const std::unique_ptr<Host>& there : world.hosts()) {
      if (here->machine != host->machine || there->machine == host->machine) continue;
      if (kind != LossKind::kDeaf) cut(here.get(), there.get());
      if (kind != LossKind::kMute) cut(there.get(), here.get());
    }
  }
}

void Schedule(Stage& stage, int rank, Nanos when, std::function<void()> strike) {
  stage.world.At(when, [&stage, rank, strike = std::move(strike)] {
    if (stage.points_to_loss == 0) return strike();
    stage.world.AfterPoints(stage.ranks[rank], stage.points_to_loss, strike);
  });
}

}  // namespace evenkeel::simulation
