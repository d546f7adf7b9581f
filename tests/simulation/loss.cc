#include "evenkeel/tests/simulation/loss.h"

#include <memory>

namespace evenkeel::simulation {
namespace {

constexpr Nanos kWhile = 4 * kSecond;

void StopForAWhile(Host* host, World& world) {
  world.Stop(host);
  world.At(world.now() + kWhile, [&world, host] { world.Continue(host); });
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

void Inflict(LossKind kind, Host* host, Stage& stage) {
  World& world = stage.world;
  Network& network = stage.network;
  if (kind == LossKind::kKilled) return world.Kill(host);
  if (kind == LossKind::kStopped) return world.Stop(host);
  if (kind == LossKind::kStoppedForAWhile) return StopForAWhile(host, world);
  if (kind == LossKind::kStoreStoppedForAWhile) return StopForAWhile(stage.store, world);
  const auto cut = [&world, &network, kind](Host* from, Host* to) {
    network.CutOneWay(from, to);
    if (kind != LossKind::kIsolatedForAWhile) return;
    world.At(world.now() + kWhile, [&network, from, to] { network.HealOneWay(from, to); });
  };
  for (const std::unique_ptr<Host>& each : world.hosts()) {
    if (each.get() == host) continue;
    if (kind != LossKind::kDeaf) cut(host, each.get());
    if (kind != LossKind::kMute) cut(each.get(), host);
  }
}

}  // namespace evenkeel::simulation
