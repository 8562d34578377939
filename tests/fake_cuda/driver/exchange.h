// How ranks of a communicator exchange bytes: a shared control block and, for each rank, files without a name that the
// others open through /proc. Nothing of it outlives the processes, however they end.
#pragma once
#include "fake.h"

namespace fake {
static const int most_ranks = 64;

struct Signature { int kind, type, op; u64 count; };  // what a rank issued; all must have issued the same

struct Member {
  std::atomic<int> process, gpu;
  int staging[2];  // what it gives to collectives, in turns: a rank is at most one collective ahead
  Signature issued[2];
  std::atomic<u64> posted;  // collectives for which its bytes are there
  std::atomic<u64> said;    // host-side exchanges likewise
  char words[2][64];
  std::atomic<int> mail[most_ranks];   // what it sends to each other rank, one after the other
  std::atomic<u64> sent[most_ranks];   // bytes
};
struct Control {
  std::atomic<uint32_t> changed;  // a futex, for all waits
  Member members[most_ranks];
};

struct Comm {
  int size, rank, control_fd;
  Control* control = nullptr;
  std::vector<int> staging[2];  // the others' files, opened here
  std::vector<int> mail;
  std::vector<u64> received;
  u64 issued = 0, words_said = 0;
  std::atomic<u64> finished{0};
  std::atomic<bool> aborted{false};
  std::atomic<ncclResult_t> error{ncclSuccess};
  std::string message;

  Member& own() { return control->members[rank]; }
  // Waits until it is true; false if the communicator was aborted, or a peer died and that is to be noticed.
  bool wait_until(const std::function<bool()>& condition, double limit_s = 0);
  void announce();  // something changed that others may wait for
  bool put_in(u64 turn, const void* from, size_t bytes, Signature what);  // then all ranks' bytes can be taken
  void take_out(u64 turn, int rank, void* to, size_t bytes, size_t offset);
  void send(int peer, const void* from, size_t bytes);
  bool receive(int peer, void* to, size_t bytes);
  bool tell_all(const void* word, size_t bytes, std::vector<std::string>& words);  // on the host
  bool join(int process, int fd, double limit_s);
};
int new_control();  // a file descriptor
}  // namespace fake
