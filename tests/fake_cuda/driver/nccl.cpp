// NCCL between real processes: collectives run on their stream's thread, wait for all ranks, and give real results.
// Sums are taken in the order of ranks, in float for the 16-bit types, so that they can be compared with the twin's.
#include <algorithm>

#include "exchange.h"

namespace fake {
enum Kind { all_gather, reduce_scatter, all_reduce, broadcast, reduce, all_to_all, point_to_point };

struct Operation {
  Kind kind;
  const void* from;
  void* to;
  size_t count;
  ncclDataType_t type;
  ncclRedOp_t op;
  int peer;  // the root; of a send or receive the other rank
  Comm* comm;
  Stream* stream;
  u64 turn;
};

static size_t width(ncclDataType_t type) {
  switch (type) {
    case ncclInt8: case ncclUint8: return 1;
    case ncclFloat16: case ncclBfloat16: return 2;
    case ncclInt64: case ncclUint64: case ncclFloat64: return 8;
    default: return type > ncclBfloat16 ? 1 : 4;  // the 8-bit floats
  }
}

// ---- numbers
struct Bfloat16 {
  uint16_t bits;
  operator float() const {
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    return memcpy(&value, &wide, 4), value;
  }
  Bfloat16() = default;
  Bfloat16(float value) {  // to the nearest, ties to even
    uint32_t wide;
    memcpy(&wide, &value, 4);
    bits = value != value ? 0x7fc0 : (uint16_t)((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
  }
};
// Multipliers of ncclRedOpCreatePreMulSum; their handles begin where NCCL's own operations end.
static std::mutex factors_mutex;
static std::vector<double>& factors = *new std::vector<double>;

template <class T, class Wide>
static void reduce_as(const std::vector<std::vector<char>>& parts, void* to, size_t count, ncclRedOp_t op) {
  double factor = 1;
  if (op >= ncclNumOps) {
    std::lock_guard<std::mutex> hold(factors_mutex);
    factor = factors[(size_t)(op - ncclNumOps)];
  }
  for (size_t i = 0; i < count; i++) {
    Wide sum = 0;
    for (size_t rank = 0; rank < parts.size(); rank++) {
      Wide x = (Wide)((const T*)parts[rank].data())[i];
      if (op >= ncclNumOps) x = (Wide)(x * factor);
      if (rank == 0) sum = x;
      else if (op == ncclProd) sum = (Wide)(sum * x);
      else if (op == ncclMax) sum = std::max(sum, x);
      else if (op == ncclMin) sum = std::min(sum, x);
      else sum = (Wide)(sum + x);
    }
    ((T*)to)[i] = (T)(op == ncclAvg ? (Wide)(sum / (Wide)parts.size()) : sum);
  }
}
static bool reduce_parts(
    const std::vector<std::vector<char>>& parts, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op) {
  switch (type) {
    case ncclFloat32: return reduce_as<float, float>(parts, to, count, op), true;
    case ncclFloat64: return reduce_as<double, double>(parts, to, count, op), true;
    case ncclBfloat16: return reduce_as<Bfloat16, float>(parts, to, count, op), true;
    case ncclFloat16: return reduce_as<_Float16, float>(parts, to, count, op), true;
    case ncclInt8: return reduce_as<int8_t, int>(parts, to, count, op), true;
    case ncclUint8: return reduce_as<uint8_t, unsigned>(parts, to, count, op), true;
    case ncclInt32: return reduce_as<int32_t, int32_t>(parts, to, count, op), true;
    case ncclUint32: return reduce_as<uint32_t, uint32_t>(parts, to, count, op), true;
    case ncclInt64: return reduce_as<int64_t, int64_t>(parts, to, count, op), true;
    case ncclUint64: return reduce_as<uint64_t, uint64_t>(parts, to, count, op), true;
    default: return false;
  }
}

// ---- collectives, on the stream's thread
static size_t elements_given(const Operation& o) {
  return o.kind == reduce_scatter || o.kind == all_to_all ? o.count * (size_t)o.comm->size : o.count;
}
static std::vector<std::vector<char>> parts_of(const Operation& o, size_t first, size_t count) {
  std::vector<std::vector<char>> parts((size_t)o.comm->size, std::vector<char>(count * width(o.type)));
  for (int rank = 0; rank < o.comm->size; rank++)
    o.comm->take_out(o.turn, rank, parts[(size_t)rank].data(), count * width(o.type), first * width(o.type));
  return parts;
}
static void give_result(const Operation& o) {
  Comm& c = *o.comm;
  size_t bytes = o.count * width(o.type), own = (size_t)c.rank * o.count;
  switch (o.kind) {
    case all_gather:
      for (int rank = 0; rank < c.size; rank++) c.take_out(o.turn, rank, (char*)o.to + (size_t)rank * bytes, bytes, 0);
      break;
    case all_to_all:
      for (int rank = 0; rank < c.size; rank++)
        c.take_out(o.turn, rank, (char*)o.to + (size_t)rank * bytes, bytes, own * width(o.type));
      break;
    case broadcast: c.take_out(o.turn, o.peer, o.to, bytes, 0); break;
    case reduce_scatter: reduce_parts(parts_of(o, own, o.count), o.to, o.count, o.type, o.op); break;
    case reduce:
      if (c.rank != o.peer) break;
      [[fallthrough]];
    default: reduce_parts(parts_of(o, 0, o.count), o.to, o.count, o.type, o.op);
  }
}
static void run_collective(const Operation& o) {
  Comm& c = *o.comm;
  // Collectives of one communicator run in the order in which they were issued, also from several streams.
  if (!c.wait_until([&] { return c.finished == o.turn - 1; })) return;
  bool gives = (o.kind != broadcast) || c.rank == o.peer;
  bool real = !too_large(elements_given(o) * width(o.type));
  Signature what{o.kind, o.type, (int)o.op, o.count};
  if (c.put_in(o.turn, o.from, gives && real ? elements_given(o) * width(o.type) : 0, what) && real) give_result(o);
  c.finished = o.turn;
  c.announce();
}

// ---- groups: what is issued between ncclGroupStart and ncclGroupEnd is one kernel
static thread_local int t_depth = 0;
static thread_local std::vector<Operation>* t_group = nullptr;

static std::string kernel_name(const Operation& o) {
  static const char* const types[] = {"i8", "u8", "i32", "u32", "i64", "u64", "f16", "f32", "f64", "bf16"};
  static const char* const kinds[] = {"AllGather", "ReduceScatter", "AllReduce", "Broadcast", "Reduce", "AllToAll",
                                      "SendRecv"};
  std::string name = std::string("ncclDevKernel_") + kinds[o.kind];
  if (o.kind == reduce_scatter || o.kind == all_reduce || o.kind == reduce)
    name += std::string("_Sum_") + types[std::min((int)o.type, 9)];
  return name + (o.kind == point_to_point ? "" : "_RING_LL") + "(ncclDevKernelArgsStorage<4096ul>)";
}
static void run_group(const std::vector<Operation>& operations) {
  static long takes_us = setting("NCCL_US", 50);
  sleep_us(takes_us);
  for (const Operation& o : operations)
    if (o.kind == point_to_point && o.from) o.comm->send(o.peer, o.from, o.count * width(o.type));
  for (const Operation& o : operations)
    if (o.kind != point_to_point) run_collective(o);
    else if (o.to) o.comm->receive(o.peer, o.to, o.count * width(o.type));
}
static void start(std::vector<Operation> operations) {
  std::map<Stream*, std::vector<Operation>> by_stream;
  for (const Operation& o : operations) by_stream[o.stream].push_back(o);
  for (auto& [stream, own] : by_stream) {
    std::vector<Operation> group = own;
    launch(kernel_name(group.front()), stream, [group] { run_group(group); });
  }
}
static ncclResult_t issue(
    Kind kind, const void* from, void* to, size_t count, ncclDataType_t type, ncclRedOp_t op, int peer, ncclComm_t comm,
    cudaStream_t stream) {
  auto* c = (Comm*)comm;
  if (op != ncclSum && type > ncclBfloat16) return ncclInvalidArgument;
  u64 turn = kind == point_to_point ? 0 : ++c->issued;
  Operation o{kind, from, to, count, type, op, peer, c, stream_of(stream), turn};
  if (t_depth > 0) t_group->push_back(o);
  else start({o});
  return ncclSuccess;
}

// ---- communicators
struct Identity { int process, fd; };
static thread_local std::string t_message;

// One GPU, several ranks: NCCL refuses this, but from 2.30 on where its environment allows it.
static ncclResult_t refuse_shared_gpu(Comm* c) {
  const char* allowed = getenv("NCCL_MULTI_RANK_GPU_ENABLE");
  if (setting("NCCL", NCCL_VERSION_CODE) >= 23000 && allowed && atoi(allowed) == 1) return ncclSuccess;
  for (int i = 0; i < c->size; i++)
    if (i != c->rank && c->control->members[i].gpu == c->own().gpu) {
      char text[128];
      snprintf(text, sizeof text, "Duplicate GPU detected : rank %d and rank %d both on CUDA device %x000", c->rank, i,
               (int)c->own().gpu);
      t_message = text;
      return ncclInvalidUsage;
    }
  return ncclSuccess;
}
static ncclResult_t join(ncclComm_t* made, int size, int rank, Identity identity) {
  *made = nullptr;
  if (need_context()) return ncclUnhandledCudaError;
  if (size > most_ranks) return t_message = "the stand-in has room for 64 ranks", ncclInvalidArgument;
  auto* c = new Comm{size, rank};
  if (!c->join(identity.process, identity.fd, (double)setting("NCCL_INIT_S", 60)))
    return t_message = c->message, ncclSystemError;
  *made = (ncclComm_t)c;
  return refuse_shared_gpu(c);
}
}  // namespace fake
using namespace fake;

extern "C" {
ncclResult_t ncclGetVersion(int* version) {
  return *version = (int)setting("NCCL", NCCL_VERSION_CODE), ncclSuccess;
}
ncclResult_t ncclGetUniqueId(ncclUniqueId* id) {
  memset(id, 0, sizeof *id);
  Identity own{getpid(), new_control()};
  memcpy(id, &own, sizeof own);
  return ncclSuccess;
}
ncclResult_t ncclCommInitRankConfig(ncclComm_t* made, int size, ncclUniqueId id, int rank, ncclConfig_t*) {
  Identity identity;
  memcpy(&identity, &id, sizeof identity);
  return join(made, size, rank, identity);
}
ncclResult_t ncclCommInitRank(ncclComm_t* made, int size, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(made, size, id, rank, nullptr);
}
ncclResult_t ncclCommInitRankScalable(
    ncclComm_t* made, int size, int rank, int, ncclUniqueId* ids, ncclConfig_t* config) {
  return ncclCommInitRankConfig(made, size, ids[0], rank, config);
}
// Each rank says its color and key and offers a control block; each color takes the one of its first rank.
ncclResult_t ncclCommSplit(ncclComm_t parent, int color, int key, ncclComm_t* made, ncclConfig_t*) {
  struct Word { int color, key, rank; Identity identity; };
  auto* c = (Comm*)parent;
  Word own{color, key, c->rank, {getpid(), new_control()}};
  std::vector<std::string> words;
  *made = nullptr;
  if (!c->tell_all(&own, sizeof own, words)) return ncclSystemError;
  std::vector<Word> group;
  for (const std::string& one : words) {
    Word word;
    memcpy(&word, one.data(), sizeof word);
    if (word.color == color) group.push_back(word);
  }
  if (color == NCCL_SPLIT_NOCOLOR) return ncclSuccess;
  std::stable_sort(group.begin(), group.end(), [](const Word& a, const Word& b) { return a.key < b.key; });
  int rank = 0;
  while (group[(size_t)rank].rank != c->rank) rank++;
  return join(made, (int)group.size(), rank, group.front().identity);
}
ncclResult_t ncclCommAbort(ncclComm_t comm) {  // never freed: a stream may still be in one of its collectives
  auto* c = (Comm*)comm;
  c->aborted = true;
  return c->announce(), ncclSuccess;
}
ncclResult_t ncclCommGetAsyncError(ncclComm_t comm, ncclResult_t* error) {
  return *error = ((Comm*)comm)->error, ncclSuccess;
}
ncclResult_t ncclCommCount(const ncclComm_t comm, int* size) { return *size = ((Comm*)comm)->size, ncclSuccess; }
ncclResult_t ncclCommUserRank(const ncclComm_t comm, int* rank) { return *rank = ((Comm*)comm)->rank, ncclSuccess; }
const char* ncclGetErrorString(ncclResult_t error) {
  switch (error) {
    case ncclSuccess: return "no error";
    case ncclUnhandledCudaError: return "unhandled cuda error (run with NCCL_DEBUG=INFO for details)";
    case ncclSystemError: return "unhandled system error (run with NCCL_DEBUG=INFO for details)";
    case ncclInvalidArgument: return "invalid argument (run with NCCL_DEBUG=WARN for details)";
    case ncclInvalidUsage: return "invalid usage (run with NCCL_DEBUG=WARN for details)";
    case ncclRemoteError: return "remote process exited or there was a network error";
    default: return "internal error";
  }
}
const char* ncclGetLastError(ncclComm_t comm) {
  return comm && !((Comm*)comm)->message.empty() ? ((Comm*)comm)->message.c_str() : t_message.c_str();
}
ncclResult_t ncclGroupStart() {
  if (t_depth++ == 0) t_group = new std::vector<Operation>;
  return ncclSuccess;
}
ncclResult_t ncclGroupEnd() {
  if (--t_depth > 0) return ncclSuccess;
  std::vector<Operation> group = std::move(*t_group);
  delete t_group;
  start(group);
  return ncclSuccess;
}
ncclResult_t ncclRedOpCreatePreMulSum(
    ncclRedOp_t* op, void* factor, ncclDataType_t type, ncclScalarResidence_t, ncclComm_t) {
  double value = 1;
  switch (type) {
    case ncclFloat32: value = *(float*)factor; break;
    case ncclFloat64: value = *(double*)factor; break;
    case ncclBfloat16: value = (float)*(Bfloat16*)factor; break;
    case ncclFloat16: value = (float)*(_Float16*)factor; break;
    default: return ncclInvalidArgument;
  }
  std::lock_guard<std::mutex> hold(factors_mutex);
  factors.push_back(value);
  return *op = (ncclRedOp_t)(ncclNumOps + (int)factors.size() - 1), ncclSuccess;
}
ncclResult_t ncclAllGather(const void* f, void* t, size_t n, ncclDataType_t d, ncclComm_t c, cudaStream_t s) {
  return issue(all_gather, f, t, n, d, ncclSum, 0, c, s);
}
ncclResult_t ncclReduceScatter(
    const void* f, void* t, size_t n, ncclDataType_t d, ncclRedOp_t op, ncclComm_t c, cudaStream_t s) {
  return issue(reduce_scatter, f, t, n, d, op, 0, c, s);
}
ncclResult_t ncclAllReduce(
    const void* f, void* t, size_t n, ncclDataType_t d, ncclRedOp_t op, ncclComm_t c, cudaStream_t s) {
  return issue(all_reduce, f, t, n, d, op, 0, c, s);
}
ncclResult_t ncclReduce(
    const void* f, void* t, size_t n, ncclDataType_t d, ncclRedOp_t op, int root, ncclComm_t c, cudaStream_t s) {
  return issue(reduce, f, t, n, d, op, root, c, s);
}
ncclResult_t ncclBroadcast(
    const void* f, void* t, size_t n, ncclDataType_t d, int root, ncclComm_t c, cudaStream_t s) {
  return issue(broadcast, f, t, n, d, ncclSum, root, c, s);
}
ncclResult_t ncclBcast(void* b, size_t n, ncclDataType_t d, int root, ncclComm_t c, cudaStream_t s) {
  return issue(broadcast, b, b, n, d, ncclSum, root, c, s);
}
ncclResult_t fake_nccl_all_to_all(
    const void* f, void* t, size_t n, ncclDataType_t d, ncclComm_t c, cudaStream_t s) __asm__("ncclAlltoAll");
ncclResult_t fake_nccl_all_to_all(
    const void* f, void* t, size_t n, ncclDataType_t d, ncclComm_t c, cudaStream_t s) {
  return issue(all_to_all, f, t, n, d, ncclSum, 0, c, s);
}
ncclResult_t ncclSend(const void* f, size_t n, ncclDataType_t d, int peer, ncclComm_t c, cudaStream_t s) {
  return issue(point_to_point, f, nullptr, n, d, ncclSum, peer, c, s);
}
ncclResult_t ncclRecv(void* t, size_t n, ncclDataType_t d, int peer, ncclComm_t c, cudaStream_t s) {
  return issue(point_to_point, nullptr, t, n, d, ncclSum, peer, c, s);
}
}
