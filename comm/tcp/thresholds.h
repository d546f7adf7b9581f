// The sizes at which collectives over TCP change their algorithms (collectives.h), for the backend
// and for models of its speed.
//
// Units: bytes, but for kTcpFewRanks.

#ifndef EVENKEEL_COMM_TCP_THRESHOLDS_H_
#define EVENKEEL_COMM_TCP_THRESHOLDS_H_

#include <cstdint>

namespace evenkeel {

// The payload of one message of a ring or a chain: small enough that a piece is added while the
// next one travels, and stays in the cache meanwhile; large enough that its header costs nothing.
inline constexpr int64_t kTcpPieceBytes = 512 << 10;
// Up to these bytes a rank sends its data directly to all others: all of them together, and each.
inline constexpr int64_t kTcpMostDirect = 64 << 10;
// Beyond so many ranks the number of messages counts, and not the bytes.
inline constexpr int kTcpFewRanks = 8;
// Up to these bytes rounds, of which there are few, beat a ring, which sends fewer bytes.
inline constexpr int64_t kTcpMostInRounds = 32 << 10;

}  // namespace evenkeel

#endif  // EVENKEEL_COMM_TCP_THRESHOLDS_H_
