// Whole training runs on simulated devices, a rank on each, against the same runs on the host: what
// every rank is told, and the weights at the end. Models compute in float32 on both and add in
// another order; what that makes of the few steps here stays within 2e-3 of the largest weight of a
// tensor, 1e-3 of a loss.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <ostream>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "evenkeel/comm/communicator.h"
#include "evenkeel/comm/device/kernel.h"
#include "evenkeel/comm/device/runtime.h"
#include "evenkeel/comm/device/simulated.h"
#include "evenkeel/comm/local/local.h"
#include "evenkeel/comm/status.h"
#include "evenkeel/comm/testing/simulated_group.h"
#include "evenkeel/comm/testing/simulated_nccl.h"
#include "evenkeel/comm/testing/simulated_nccl_group.h"
#include "evenkeel/trainer/app/rank_setup.h"
#include "evenkeel/trainer/app/testing/prepare_rank.h"
#include "evenkeel/trainer/app/train_options.h"
#include "evenkeel/trainer/app/train_rank.h"
#include "evenkeel/trainer/app/training_run.h"
#include "evenkeel/trainer/data/batch.h"
#include "evenkeel/trainer/data/dataset.h"
#include "evenkeel/trainer/data/image_shape.h"
#include "evenkeel/trainer/data/training_data.h"
#include "evenkeel/trainer/models/evaluate.h"
#include "evenkeel/trainer/models/model.h"
#include "evenkeel/trainer/models/testing/model_test_data.h"
#include "evenkeel/trainer/report/run_record.h"
#include "evenkeel/zero_optim/checkpoint/safetensors.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace evenkeel {
namespace {

using testing::HasSubstr;

constexpr int kSide = 12;

constexpr ImageShape kImage{.channels = 1, .side = kSide};

class Stripes : public Dataset {
 public:
  Stripes(int count, uint64_t seed) : all_(StripedImages(count, seed, kImage)) {}
  int64_t size() const override { return static_cast<int64_t>(all_.labels.size()); }
  Batch Gather(std::span<const int32_t> samples, BatchMemory& memory) const override {
    memory.images.clear();
    memory.labels.clear();
    for (const int32_t sample : samples) {
      const auto first = all_.images.begin() + int64_t{sample} * kImage.pixels();
      memory.images.insert(memory.images.end(), first, first + kImage.pixels());
      memory.labels.push_back(all_.labels[sample]);
    }
    return ImageBatch{memory.images, memory.labels};
  }

 private:
  const TestBatch all_;
};

const std::shared_ptr<const TrainingData>& Data() {
  static const auto* const data = new std::shared_ptr<const TrainingData>(
      new TrainingData{.train = std::make_unique<const Stripes>(60, 1),
                       .test = std::make_unique<const Stripes>(17, 2),
                       .image = kImage});
  return *data;
}

TrainFlags Mlp() {
  return {.model = "mlp", .hidden = "20", .batch_size = 4, .lr = 0.003, .zero = false};
}
TrainFlags Cnn() {
  return {
      .model = "cnn", .widths = "4,6", .batch_size = 4, .lr = 0.003, .warmup = 0, .zero = false};
}

// Rank 0's results of a run.
struct Seen {
  std::vector<std::string> steps;
  std::vector<double> losses;
  std::vector<double> scales;
  Evaluation test;
  std::vector<std::vector<float>> tensors;  // Values, then buffers.
};

absl::Status Train(Communicator& comm, const TrainFlags& flags, int epochs, Seen& seen) {
  EK_ASSIGN_OR_RETURN(const TrainOptions options, MakeTrainOptions(flags));
  EK_ASSIGN_OR_RETURN(RankSetup setup,
                      PrepareRank(options, Data(), comm.rank(), comm.world_size()));
  if (comm.runtime() != nullptr)
    EK_RETURN_IF_ERROR(MoveToDevice(options, *comm.runtime(), comm.device(), setup));
  EK_ASSIGN_OR_RETURN(const auto run, TrainingRun::Create(&comm, options, std::move(setup)));
  Seen mine;
  for (int epoch = 0; epoch < epochs; ++epoch) {
    EK_ASSIGN_OR_RETURN(
        const EpochResult result, run->TrainEpoch(epoch, [&](const StepFacts& facts) {
          mine.steps.push_back(absl::StrCat(facts.step, ": ", facts.active, " ranks, ",
                                            facts.samples, " samples, own ", facts.own_samples));
          EXPECT_EQ(facts.own.has_value(), facts.own_samples > 0);
          const bool is_device = comm.runtime() != nullptr && facts.own.has_value();
          EXPECT_EQ(facts.clock, is_device ? StepClock::kDevice : StepClock::kHost);
          if (facts.loss_scale > 0) mine.scales.push_back(facts.loss_scale);
          if (facts.own.has_value()) mine.losses.push_back(facts.own->loss_mean);
          return absl::OkStatus();
        }));
    mine.losses.push_back(result.training.loss_mean());
  }
  EK_ASSIGN_OR_RETURN(mine.test, run->Test());
  EK_RETURN_IF_ERROR(run->AgreeOnState().status());
  EK_ASSIGN_OR_RETURN(const HostTensors tensors, run->model().ToHost());
  for (const auto* const list : {&tensors.values, &tensors.buffers}) {
    for (const TensorView& tensor : *list) {
      const auto values = tensor.as<float>();
      mine.tensors.emplace_back(values.begin(), values.end());
    }
  }
  if (comm.rank() == 0) seen = std::move(mine);
  return absl::OkStatus();
}

Seen OnHost(int ranks, const TrainFlags& flags, int epochs) {
  Seen seen;
  const absl::Status status =
      RunRanks(ranks, [&](Communicator& comm) { return Train(comm, flags, epochs, seen); });
  EXPECT_TRUE(status.ok()) << status;
  return seen;
}

Seen OnDevices(int ranks, const TrainFlags& flags, int epochs,
               absl::Duration delay = absl::ZeroDuration()) {
  Seen seen;
  SimulatedDevices devices({.count = ranks, .delay = delay});
  const absl::Status status = internal::RunSimulatedRanks(
      devices, ranks, [&](Communicator& comm) { return Train(comm, flags, epochs, seen); });
  EXPECT_TRUE(status.ok()) << status;
  return seen;
}

void ExpectAlike(const Seen& host, const Seen& device) {
  EXPECT_EQ(device.steps, host.steps);
  ASSERT_EQ(device.losses.size(), host.losses.size());
  for (size_t i = 0; i < host.losses.size(); ++i)
    EXPECT_NEAR(device.losses[i], host.losses[i], 1e-3) << i;
  EXPECT_EQ(device.test.predictions, host.test.predictions);
  EXPECT_NEAR(device.test.loss_mean(), host.test.loss_mean(), 1e-3);
  ASSERT_EQ(device.tensors.size(), host.tensors.size());
  for (size_t t = 0; t < host.tensors.size(); ++t) {
    double largest = 1e-3, apart = 0;
    for (size_t i = 0; i < host.tensors[t].size(); ++i) {
      largest = std::max<double>(largest, std::abs(host.tensors[t][i]));
      apart = std::max<double>(apart, std::abs(host.tensors[t][i] - device.tensors[t][i]));
    }
    EXPECT_LT(apart / largest, 2e-3) << "tensor " << t;
  }
}

struct Case {
  std::string name;
  TrainFlags flags;
  friend std::ostream& operator<<(std::ostream& out, const Case& c) { return out << c.name; }
};

TrainFlags With(TrainFlags flags, const std::function<void(TrainFlags&)>& change) {
  change(flags);
  return flags;
}

class DeviceTrainingTest : public ::testing::TestWithParam<Case> {};

TEST_P(DeviceTrainingTest, IsAsOnTheHost) {
  for (const int ranks : {1, 2, 3}) {
    TrainFlags flags = GetParam().flags;
    if (flags.rank_steps == "uneven") {
      if (ranks == 1) continue;
      flags.rank_steps = ranks == 2 ? "3,1" : "1,0,3";
    }
    if (flags.rank_steps == "even")
      flags.rank_steps = std::string("4,4,4").substr(0, 2 * ranks - 1);
    SCOPED_TRACE(absl::StrCat(ranks, " ranks"));
    ExpectAlike(OnHost(ranks, flags, 2), OnDevices(ranks, flags, 2));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Runs, DeviceTrainingTest,
    testing::Values(
        Case{"mlp", Mlp()}, Case{"cnn", Cnn()},
        Case{"MlpUneven", With(Mlp(), [](TrainFlags& f) { f.rank_steps = "uneven"; })},
        Case{"CnnUneven", With(Cnn(), [](TrainFlags& f) { f.rank_steps = "uneven"; })},
        Case{"MlpUnjoined", With(Mlp(),
                                 [](TrainFlags& f) {
                                   f.join = false, f.rank_steps = "even", f.optimizer = "sgd",
                                   f.momentum = 0.9;
                                 })},
        Case{"MlpFreezesAndClips",
             With(Mlp(), [](TrainFlags& f) { f.freeze = "fc1@2:4", f.clip = 0.5; })},
        Case{"CnnFreezes",
             With(Cnn(),
                  [](TrainFlags& f) { f.freeze = "stem@1:3,block1@2:3", f.grad_view = true; })},
        Case{"MlpSlices",
             With(Mlp(), [](TrainFlags& f) { f.zero = true, f.rank_steps = "uneven"; })},
        Case{"CnnSlices", With(Cnn(), [](TrainFlags& f) { f.zero = true, f.clip = 0.5; })},
        Case{"MlpTensors", With(Mlp(),
                                [](TrainFlags& f) {
                                  f.zero = true, f.shards = "tensors", f.rank_steps = "uneven",
                                  f.clip = 0.5;
                                })},
        Case{"MlpStopsEarly",
             With(Mlp(), [](TrainFlags& f) { f.rank_steps = "uneven", f.stop_early = true; })},
        Case{"MlpAccumulates",
             With(Mlp(), [](TrainFlags& f) { f.accumulate = 3, f.divide_by = "effective"; })}),
    [](const testing::TestParamInfo<Case>& info) { return info.param.name; });

TEST(DeviceRunTest, AStepIsToldAfterTheNextOneAndAllOfThemAreTold) {
  const Seen host = OnHost(2, Mlp(), 1);
  const Seen device = OnDevices(2, Mlp(), 1, absl::Microseconds(300));
  ExpectAlike(host, device);
}

// Parameters are the master copy: what a few steps make of the rounding stays small beside what
// they change.
TEST(DeviceRunTest, ARunInBFloat16IsCloseToOneInFloat32AndTheSameOnAllRanks) {
  for (TrainFlags flags : {Mlp(), Cnn()}) {
    flags.optimizer = "sgd";
    flags.lr = 0.02;
    const Seen exact = OnDevices(2, flags, 2);
    flags.compute = "bfloat16";
    const Seen rounded = OnDevices(2, flags, 2);
    ASSERT_EQ(rounded.losses.size(), exact.losses.size());
    for (size_t i = 0; i < exact.losses.size(); ++i)
      EXPECT_NEAR(rounded.losses[i], exact.losses[i], 0.03) << i;
    EXPECT_NE(rounded.losses, exact.losses);
    ASSERT_EQ(rounded.tensors.size(), exact.tensors.size());
    for (size_t t = 0; t < exact.tensors.size(); ++t) {
      double apart = 0;
      for (size_t i = 0; i < exact.tensors[t].size(); ++i) {
        apart = std::max<double>(apart, std::abs(exact.tensors[t][i] - rounded.tensors[t][i]));
      }
      EXPECT_LT(apart, 0.02) << "tensor " << t;
    }
  }
}

// The scale follows one step late: a step that overflows halves it after the next one.
TEST(DeviceRunTest, ARunInFloat16LeavesOutStepsThatOverflowAndThenTrains) {
  TrainFlags flags = Mlp();
  flags.optimizer = "sgd";
  flags.lr = 0.2;
  flags.loss_scale = 1 << 20;
  flags.batch_size = 8;
  const Seen exact = OnDevices(1, flags, 8);
  EXPECT_TRUE(exact.scales.empty());
  flags.compute = "float16";
  const Seen one = OnDevices(1, flags, 8);
  flags.batch_size = 4;
  for (const std::string shards : {"", "slices", "tensors"}) {
    flags.zero = !shards.empty();
    flags.shards = shards.empty() ? "slices" : shards;
    const Seen two = OnDevices(2, flags, 8);
    EXPECT_EQ(two.scales, one.scales);
    ASSERT_GE(one.scales.size(), 20u);
    EXPECT_EQ(one.scales[0], 1 << 20);
    EXPECT_EQ(one.scales[1], 1 << 20);
    EXPECT_EQ(one.scales[2], 1 << 19);
    EXPECT_LT(one.scales.back(), 1 << 18);
    EXPECT_EQ(one.scales.back(), one.scales[one.scales.size() / 2]) << "it has settled";
    EXPECT_NEAR(two.test.loss_mean(), one.test.loss_mean(), 0.02);
    EXPECT_LT(two.test.loss_mean(), two.losses.front() - 0.03);
    for (size_t t = 0; t < one.tensors.size(); ++t) {
      for (size_t i = 0; i < one.tensors[t].size(); ++i)
        EXPECT_NEAR(two.tensors[t][i], one.tensors[t][i], 1e-2);
    }
  }
}

// Once memory is there the host waits for no device: but for one that is a step behind, which this
// one never is.
TEST(DeviceRunTest, AStepNeedsNoHostWait) {
  const TrainFlags scaled = With(Mlp(), [](TrainFlags& f) { f.compute = "float16"; });
  for (const TrainFlags& flags : {Mlp(), Cnn(), scaled}) {
    SimulatedDevices devices({.count = 2});
    std::mutex mutex;
    std::map<int64_t, int64_t> waits;  // By step, that was told.
    const absl::Status status =
        internal::RunSimulatedRanks(devices, 2, [&](Communicator& comm) -> absl::Status {
          EK_ASSIGN_OR_RETURN(const TrainOptions options, MakeTrainOptions(flags));
          EK_ASSIGN_OR_RETURN(RankSetup setup,
                              PrepareRank(options, Data(), comm.rank(), comm.world_size()));
          EK_RETURN_IF_ERROR(MoveToDevice(options, *comm.runtime(), comm.device(), setup));
          const StreamRef stream = setup.model->place().stream.ref();
          EK_ASSIGN_OR_RETURN(const auto run,
                              TrainingRun::Create(&comm, options, std::move(setup)));
          return run
              ->TrainEpoch(0,
                           [&](const StepFacts& facts) -> absl::Status {
                             // The device comes by, without a wait of the runtime's.
                             EK_ASSIGN_OR_RETURN(const Event event, devices.Record(stream));
                             while (!*devices.IsDone(event))
                               absl::SleepFor(absl::Microseconds(100));
                             const std::lock_guard<std::mutex> lock(mutex);
                             waits[facts.step] = devices.host_waits();
                             return absl::OkStatus();
                           })
              .status();
        });
    ASSERT_TRUE(status.ok()) << status;
    ASSERT_GE(waits.size(), 7u);
    EXPECT_EQ(waits.at(5), waits.at(2)) << "steps 3 to 5";
  }
}

constexpr absl::Duration kSlow = absl::Milliseconds(20);

// Devices of which some kernels, or what waits on streams other than the model's, take long. The
// host sees none of it.
class SlowDevices : public SimulatedDevices {
 public:
  SlowDevices(int count, std::vector<std::string> kernels, bool slows_others)
      : SimulatedDevices({.count = count}),
        kernels_(std::move(kernels)),
        slows_others_(slows_others) {}

  void SetModelStream(StreamRef stream) {
    const std::lock_guard<std::mutex> lock(mutex_);
    model_streams_.push_back(stream.handle);
  }

  absl::Status LaunchRaw(const DeviceKernel& kernel, const LaunchShape& shape,
                         absl::Span<void* const> args, StreamRef stream) override {
    if (std::ranges::count(kernels_, kernel.name) > 0) EK_RETURN_IF_ERROR(Sleep(stream));
    return SimulatedDevices::LaunchRaw(kernel, shape, args, stream);
  }
  absl::Status Wait(StreamRef stream, const Event& event) override {
    EK_RETURN_IF_ERROR(SimulatedDevices::Wait(stream, event));
    const std::lock_guard<std::mutex> lock(mutex_);
    const bool is_other =
        !model_streams_.empty() && std::ranges::count(model_streams_, stream.handle) == 0;
    return slows_others_ && is_other ? Sleep(stream) : absl::OkStatus();
  }

 private:
  absl::Status Sleep(StreamRef stream) {
    return Put(stream, [] { absl::SleepFor(kSlow); });
  }

  const std::vector<std::string> kernels_;
  const bool slows_others_;
  std::mutex mutex_;
  std::vector<void*> model_streams_;
};

struct Timed {
  std::vector<StepFacts> steps;
  RankRecord record;
};

Timed TimesOf(SlowDevices& devices, int ranks) {
  TrainFlags flags = Mlp();
  flags.report = absl::StrCat(std::getenv("TEST_TMPDIR"), "/report.html");
  Timed timed;
  const absl::Status status =
      internal::RunSimulatedRanks(devices, ranks, [&](Communicator& comm) -> absl::Status {
        EK_ASSIGN_OR_RETURN(const TrainOptions options, MakeTrainOptions(flags));
        EK_ASSIGN_OR_RETURN(RankSetup setup,
                            PrepareRank(options, Data(), comm.rank(), comm.world_size()));
        EK_RETURN_IF_ERROR(MoveToDevice(options, *comm.runtime(), comm.device(), setup));
        devices.SetModelStream(setup.model->place().stream.ref());
        EK_ASSIGN_OR_RETURN(const auto run, TrainingRun::Create(&comm, options, std::move(setup)));
        return run
            ->TrainEpoch(0,
                         [&](const StepFacts& facts) {
                           if (comm.rank() == 0) {
                             timed.steps.push_back(facts);
                             timed.record = run->Record();
                           }
                           return absl::OkStatus();
                         })
            .status();
      });
  EXPECT_TRUE(status.ok()) << status;
  return timed;
}

// The host's time to put a kernel on a stream does not depend on how long it runs there.
TEST(DeviceRunTest, WhatTheDeviceTakesLongForShowsInItsPart) {
  SlowDevices devices(1, {"ek_class_loss", "ek_relu_backward_float", "ek_update_adam_float"},
                      /*slows_others=*/false);
  const Timed timed = TimesOf(devices, 1);
  ASSERT_EQ(timed.steps.size(), 15u);
  for (const StepFacts& step : timed.steps) {
    EXPECT_EQ(step.clock, StepClock::kDevice);
    EXPECT_GE(step.took, 3 * kSlow) << step.step;
    EXPECT_LE(step.sync, step.took - 3 * kSlow) << step.step;
  }
  ASSERT_FALSE(timed.record.traces.empty());
  for (const StepTrace& trace : timed.record.traces) {
    SCOPED_TRACE(absl::StrCat("step ", trace.step));
    EXPECT_EQ(trace.clock, StepClock::kDevice);
    EXPECT_TRUE(trace.buckets.empty());
    EXPECT_GT(trace.host_ns, 0);
    std::map<SpanKind, absl::Duration> parts;
    for (const TraceSpan& span : trace.spans)
      parts[span.kind] += absl::Nanoseconds(span.end_ns - span.begin_ns);
    EXPECT_EQ(parts.size(), 6u);
    for (const SpanKind slow : {SpanKind::kForward, SpanKind::kBackward, SpanKind::kOptimizer}) {
      EXPECT_GE(parts[slow], kSlow) << static_cast<int>(slow);
    }
  }
}

// Other streams' work shows as the time that the model's stream waits for it. What comes of it
// before backward has ended is hidden, so one step of all is enough.
TEST(DeviceRunTest, ExposedCommunicationIsWhatTheModelsStreamWaitsForTheReduction) {
  SlowDevices devices(2, {}, /*slows_others=*/true);
  const Timed timed = TimesOf(devices, 2);
  absl::Duration most;
  for (const StepFacts& step : timed.steps) most = std::max(most, step.sync);
  EXPECT_GE(most, kSlow / 2);
  ASSERT_FALSE(timed.record.traces.empty());
  for (const StepTrace& trace : timed.record.traces) {
    absl::Duration wait;
    for (const TraceSpan& span : trace.spans) {
      if (span.kind == SpanKind::kWait) wait += absl::Nanoseconds(span.end_ns - span.begin_ns);
    }
    for (const StepFacts& step : timed.steps) {
      if (step.step == trace.step) {
        EXPECT_EQ(wait, step.sync);
      }
    }
  }
}

TEST(DeviceRunTest, ALossThatIsNotFiniteEndsTheRun) {
  TrainFlags flags = Mlp();
  flags.optimizer = "sgd";
  flags.lr = 1e30;
  SimulatedDevices devices({.count = 2});
  Seen seen;
  const absl::Status status = internal::RunSimulatedRanks(
      devices, 2, [&](Communicator& comm) { return Train(comm, flags, 1, seen); });
  EXPECT_THAT(std::string(status.message()), HasSubstr("the loss is "));
}

// A run from its beginning to its files, and on from there: with all that comes before the first
// step and after the last.
TEST(DeviceRunTest, TheHostTouchesNoMemoryOfADevice) {
  for (const bool zero : {false, true}) {
    for (TrainFlags flags : {Mlp(), Cnn()}) {
      const std::string root =
          absl::StrCat(std::getenv("TEST_TMPDIR"), "/guarded_", flags.model, zero);
      flags.zero = zero;
      flags.clip = 1.0;
      flags.freeze = flags.model == "mlp" ? "fc1@2:4" : "stem@1:3";
      flags.checkpoint_dir = root;
      flags.save = root + ".safetensors";
      flags.lr_decay = "none";
      for (const int epochs : {1, 2}) {  // The second goes on from the first one's checkpoint.
        flags.epochs = epochs;
        const absl::StatusOr<TrainOptions> options = MakeTrainOptions(flags);
        ASSERT_TRUE(options.ok()) << options.status();
        std::FILE* const out = std::fopen(absl::StrCat(root, ".out").c_str(), "w");
        SimulatedDevices devices({.guards_memory = true});
        internal::SimulatedNccl nccl(devices);  // Its collectives run on streams alone.
        const auto group = internal::CreateSimulatedNcclGroup(devices, nccl, 1);
        ASSERT_TRUE(group.ok()) << group.status();
        const absl::Status status =
            TrainRank(*(*group)[0], *options, Data(), {.out = out, .log = out}).status;
        EXPECT_TRUE(status.ok()) << status;
        std::fclose(out);
      }
    }
  }
}

// Files have no device: a run that began there goes on here.
TEST(DeviceRunTest, ARunGoesOnOnTheOtherKindOfDevice) {
  const std::string root = absl::StrCat(std::getenv("TEST_TMPDIR"), "/checkpoints");
  const auto train = [&](bool on_devices, const std::string& folder, int epochs,
                         const std::string& save) {
    TrainFlags flags = Cnn();
    flags.checkpoint_dir = absl::StrCat(root, folder);
    flags.epochs = epochs;
    flags.save = save;
    flags.lr_decay = "none";
    const absl::StatusOr<TrainOptions> options = MakeTrainOptions(flags);
    ASSERT_TRUE(options.ok()) << options.status();
    std::FILE* const out = std::fopen(absl::StrCat(root, ".out").c_str(), "w");
    const auto body = [&](Communicator& comm) {
      return TrainRank(comm, *options, Data(), {.out = out, .log = out}).status;
    };
    SimulatedDevices devices({.count = 2});
    const absl::Status status =
        on_devices ? internal::RunSimulatedRanks(devices, 2, body) : RunRanks(2, body);
    EXPECT_TRUE(status.ok()) << status;
    std::fclose(out);
  };
  const auto read = [](const std::string& path) { return *SafetensorsFile::Read(path); };
  const std::string whole = root + "_whole.safetensors", parts = root + "_parts.safetensors";
  train(false, "_host", 2, whole);
  for (const bool first_on_device : {true, false}) {
    const std::string folder = first_on_device ? "_device_host" : "_host_device";
    train(first_on_device, folder, 1, "");
    train(!first_on_device, folder, 2, parts);
    const SafetensorsFile a = read(whole), b = read(parts);
    ASSERT_EQ(a.tensors().size(), b.tensors().size());
    for (const auto& tensor : a.tensors()) {
      const SafetensorsFile::Tensor* const other = b.Find(tensor.name);
      ASSERT_NE(other, nullptr) << tensor.name;
      ASSERT_EQ(other->bytes.size(), tensor.bytes.size());
      const auto* const x = reinterpret_cast<const float*>(tensor.bytes.data());
      const auto* const y = reinterpret_cast<const float*>(other->bytes.data());
      double largest = 1e-3, apart = 0;
      for (size_t i = 0; i < tensor.bytes.size() / sizeof(float); ++i) {
        largest = std::max<double>(largest, std::abs(x[i]));
        apart = std::max<double>(apart, std::abs(x[i] - y[i]));
      }
      EXPECT_LT(apart / largest, 2e-3) << tensor.name << folder;
    }
  }
}

// The scale is still on its way when the first part ends, and a step has overflowed that it has not
// followed yet.
TEST(DeviceRunTest, ARunInFloat16GoesOnWithItsScaleBitForBit) {
  const std::string root = absl::StrCat(std::getenv("TEST_TMPDIR"), "/scaled");
  const auto train = [&](const std::string& folder, int epochs, const std::string& save) {
    TrainFlags flags = Mlp();
    flags.compute = "float16";
    flags.loss_scale = 1 << 28;
    flags.checkpoint_dir = absl::StrCat(root, folder);
    flags.epochs = epochs;
    flags.save = save;
    flags.lr_decay = "none";
    const absl::StatusOr<TrainOptions> options = MakeTrainOptions(flags);
    ASSERT_TRUE(options.ok()) << options.status();
    std::FILE* const out = std::fopen(absl::StrCat(root, ".out").c_str(), "w");
    SimulatedDevices devices({.count = 2});
    const absl::Status status = internal::RunSimulatedRanks(devices, 2, [&](Communicator& comm) {
      return TrainRank(comm, *options, Data(), {.out = out, .log = out}).status;
    });
    EXPECT_TRUE(status.ok()) << status;
    std::fclose(out);
  };
  const std::string whole = root + "_whole.safetensors", parts = root + "_parts.safetensors";
  train("_whole", 3, whole);
  train("_parts", 1, "");
  train("_parts", 3, parts);
  const SafetensorsFile a = *SafetensorsFile::Read(whole), b = *SafetensorsFile::Read(parts);
  for (const auto& tensor : a.tensors()) {
    const SafetensorsFile::Tensor* const other = b.Find(tensor.name);
    ASSERT_NE(other, nullptr) << tensor.name;
    EXPECT_EQ(other->bytes, tensor.bytes) << tensor.name;
  }
}

}  // namespace
}  // namespace evenkeel
