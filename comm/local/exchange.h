// Moves the data of one collective whose ranks are all in this address space.
//
//   LocalExchange exchange({&rank0, &rank1, &rank2});      // their operations, in rank order
//   exchange.Prepare();
//   exchange.Run(0, exchange.elements(), stop);            // or slices of it, on several threads
//
// Nothing is copied in between: each slice is read from the inputs and written to the outputs. Each
// element is combined in rank order by itself, so a result does not depend on the slices.
//
// Units:    elements of `Collective::count`; of an uneven collective, those from one rank to
// another. Aliasing: an output may overlap its own rank's input in any way. Threads:  Prepare()
// before anything else; Run() of disjoint ranges at the same time.

#ifndef EVENKEEL_COMM_LOCAL_EXCHANGE_H_
#define EVENKEEL_COMM_LOCAL_EXCHANGE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "evenkeel/comm/backend.h"

namespace evenkeel::internal {

class LocalExchange {
 public:
  // `seats`: the operation of every rank in rank order; of a send and its recv these two, in this
  // order. They agree on what they do, and must outlive this.
  explicit LocalExchange(std::vector<Operation*> seats);

  // Sets inputs aside that would be overwritten before they are read.
  void Prepare();

  int64_t elements() const;
  // Written in all, which tells how long Run() takes.
  int64_t bytes() const;
  // Elements [begin, end) of every rank. Gives up between two blocks once `stop` is true.
  void Run(int64_t begin, int64_t end, const std::atomic<bool>& stop) const;

 private:
  int64_t count() const { return seats_.front()->what.count; }
  // Elements [begin, end) from each rank to each other one.
  void RunUneven(int64_t begin, int64_t end, const std::atomic<bool>& stop) const;
  int size() const { return static_cast<int>(seats_.size()); }

  const std::vector<Operation*> seats_;
  std::vector<std::unique_ptr<std::byte[]>> set_aside_;
};

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_LOCAL_EXCHANGE_H_
