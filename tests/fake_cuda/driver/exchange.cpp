// Exchanging bytes between the ranks of a communicator: see exchange.h.
#include "exchange.h"

#include <cerrno>
#include <fcntl.h>
#include <linux/futex.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>

namespace fake {
static double seconds() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return (double)time.tv_sec + (double)time.tv_nsec / 1e9;
}
static int new_file() { return memfd_create("fake_nccl", MFD_CLOEXEC); }
static int file_of(int process, int fd) {
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", process, fd);
  return open(path, O_RDWR | O_CLOEXEC);
}
static void write_all(int fd, const void* from, size_t bytes, u64 offset) {
  for (size_t done = 0; done < bytes;) {
    ssize_t n = pwrite(fd, (const char*)from + done, bytes - done, (off_t)(offset + done));
    if (n <= 0) fprintf(stderr, "fake_cuda: cannot write what a rank sends: %s\n", strerror(errno)), abort();
    done += (size_t)n;
  }
}
static void read_all(int fd, void* to, size_t bytes, u64 offset) {
  for (size_t done = 0; done < bytes;) {
    ssize_t n = pread(fd, (char*)to + done, bytes - done, (off_t)(offset + done));
    if (n <= 0) fprintf(stderr, "fake_cuda: cannot read what a rank sent: %s\n", n ? strerror(errno) : "short"), abort();
    done += (size_t)n;
  }
}

int new_control() {
  int fd = new_file();
  return ftruncate(fd, sizeof(Control)) ? -1 : fd;
}

void Comm::announce() {
  control->changed++;
  syscall(SYS_futex, &control->changed, FUTEX_WAKE, 1 << 30, nullptr, nullptr, 0);
}
// NCCL does not notice the death of a rank on the same machine; over sockets it does: FAKE_CUDA_NCCL_LOST=error.
static bool somebody_died(Control* control, int size) {
  for (int i = 0; i < size; i++)
    if (int process = control->members[i].process; process && kill(process, 0) && errno == ESRCH) return true;
  return false;
}
bool Comm::wait_until(const std::function<bool()>& condition, double limit_s) {
  static bool notices = word("NCCL_LOST") == "error";
  double begin = seconds();
  for (;;) {
    uint32_t before = control->changed;
    if (condition()) return true;
    if (aborted) return false;
    if (limit_s > 0 && seconds() - begin > limit_s) return false;
    if (notices && seconds() - begin > 0.2 && somebody_died(control, size)) {
      message = "a rank of the communicator has ended";
      error = ncclRemoteError;
    }
    timespec patience{0, 50 * 1000000};
    syscall(SYS_futex, &control->changed, FUTEX_WAIT, before, &patience, nullptr, 0);
  }
}

bool Comm::join(int process, int fd, double limit_s) {
  control_fd = process == getpid() ? fd : file_of(process, fd);
  if (control_fd < 0) return message = "the rank that made the unique id has ended", false;
  control = (Control*)mmap(nullptr, sizeof(Control), PROT_READ | PROT_WRITE, MAP_SHARED, control_fd, 0);
  for (int& one : own().staging) one = new_file();
  own().gpu = physical(t_device) + 1;
  own().process = getpid();
  announce();
  auto all_joined = [&] {
    for (int i = 0; i < size; i++)
      if (!control->members[i].process) return false;
    return true;
  };
  if (!wait_until(all_joined, limit_s)) return message = "not all ranks came", false;
  for (int i = 0; i < size; i++) {
    Member& member = control->members[i];
    for (int turn : {0, 1}) staging[turn].push_back(file_of(member.process, member.staging[turn]));
    mail.push_back(-1);
    received.push_back(0);
  }
  return true;
}

static bool same(const Signature& a, const Signature& b) {
  return a.kind == b.kind && a.type == b.type && a.op == b.op && a.count == b.count;
}

bool Comm::put_in(u64 turn, const void* from, size_t bytes, Signature what) {
  int slot = (int)(turn % 2);
  write_all(own().staging[slot], from, bytes, 0);
  own().issued[slot] = what;
  own().posted = turn;
  announce();
  auto all_posted = [&] {
    for (int i = 0; i < size; i++)
      if (control->members[i].posted < turn) return false;
    return true;
  };
  if (!wait_until(all_posted)) return false;
  for (int i = 0; i < size; i++) {
    const Signature& other = control->members[i].issued[slot];
    if (same(other, what)) continue;
    fprintf(stderr,
            "fake_cuda: ranks of a communicator issued different collectives as their number %llu: rank %d kind %d of "
            "%llu elements of type %d, rank %d kind %d of %llu elements of type %d\n",
            turn, rank, what.kind, what.count, what.type, i, other.kind, other.count, other.type);
    error = ncclInvalidUsage;
    return false;
  }
  return true;
}
void Comm::take_out(u64 turn, int from, void* to, size_t bytes, size_t offset) {
  read_all(staging[turn % 2][(size_t)from], to, bytes, offset);
}

void Comm::send(int peer, const void* from, size_t bytes) {
  if (!own().mail[peer]) own().mail[peer] = new_file();
  u64 before = own().sent[peer];
  write_all(own().mail[peer], from, bytes, before);
  own().sent[peer] = before + bytes;
  announce();
}
bool Comm::receive(int peer, void* to, size_t bytes) {
  Member& sender = control->members[peer];
  u64& taken = received[(size_t)peer];
  if (!wait_until([&] { return sender.sent[rank] >= taken + bytes; })) return false;
  int& fd = mail[(size_t)peer];
  if (fd < 0) fd = file_of(sender.process, sender.mail[rank]);
  read_all(fd, to, bytes, taken);
  fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)taken, (off_t)bytes);
  taken += bytes;
  return true;
}

bool Comm::tell_all(const void* word, size_t bytes, std::vector<std::string>& words) {
  u64 turn = ++words_said;
  memcpy(own().words[turn % 2], word, bytes);
  own().said = turn;
  announce();
  auto all_said = [&] {
    for (int i = 0; i < size; i++)
      if (control->members[i].said < turn) return false;
    return true;
  };
  if (!wait_until(all_said, 60)) return false;
  for (int i = 0; i < size; i++) words.emplace_back(control->members[i].words[turn % 2], bytes);
  return true;
}
}  // namespace fake
