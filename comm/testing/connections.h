// The TCP connections of this process, and what a network does to them without a word to either
// end.
//
//   const std::vector<int> before = TcpConnections();
//   ... a group over TCP is made ...
//   // Segments that come are dropped, and not acknowledged.
//   for (int fd : TcpConnections()) DropIncoming(fd);
//
// Needs no privilege: options of IPv4 sockets stand in for the network.

#ifndef EVENKEEL_COMM_TESTING_CONNECTIONS_H_
#define EVENKEEL_COMM_TESTING_CONNECTIONS_H_

#include <vector>

namespace evenkeel::internal {

// Descriptors, which stay their owners'.
std::vector<int> TcpConnections();
void DropIncoming(int fd);
void StopDropping(int fd);
// Limits the rate at which this side sends.
void SlowDown(int fd, int bytes_per_second);

}  // namespace evenkeel::internal

#endif  // EVENKEEL_COMM_TESTING_CONNECTIONS_H_
