// CUDA on a CPU, for tests: every thread of every block is a fiber, and one thread of the machine runs them in turn.
// A fiber gives way where CUDA's threads wait for each other. If none can go on, the kernel would hang: it is an error.
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>
#include <vector>

#define DEV static inline
#define OUTLINED static
#define KERNEL extern "C" void
#define INF INFINITY
struct uint4 { u32 x, y, z, w; };
struct uint2 { u32 x, y; };
struct float2 { float x, y; };
static inline uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
static inline float2 make_float2(float x, float y) { return {x, y}; }
static inline float __uint_as_float(u32 x) { float f; memcpy(&f, &x, 4); return f; }
static inline u32 __float_as_uint(float x) { u32 f; memcpy(&f, &x, 4); return f; }

struct Warp { int waiting, turn; u32 a[32][4], b[32][2]; float lanes[32]; };
struct Block { int waiting, turn; std::vector<Warp> warps; char* memory; };
struct Index { int x; };
struct Fiber { ucontext_t context; Block* block; Index thread, index; bool done; char* stack; };
static Fiber* now;
static ucontext_t scheduler;
static int block_size;
static long idle;
#define threadIdx (now->thread)
#define blockIdx (now->index)
#define SHARED char* shared = now->block->memory;

static void give_way() { swapcontext(&now->context, &scheduler); }
#define YIELD give_way();
static void meet(int& waiting, int& turn, int count) {
  const int mine = turn;
  if (++waiting == count) { waiting = 0; turn++; idle = 0; return; }
  while (turn == mine) give_way();
}
static inline Warp& warp_of() { return now->block->warps[now->thread.x / 32]; }
static inline void __syncthreads() { meet(now->block->waiting, now->block->turn, block_size); }
static inline void __syncwarp() { Warp& w = warp_of(); meet(w.waiting, w.turn, 32); }
static inline float __shfl_xor_sync(u32, float v, int mask) {
  Warp& w = warp_of();
  const int lane = now->thread.x & 31;
  w.lanes[lane] = v;
  __syncwarp();
  const float other = w.lanes[lane ^ mask];
  __syncwarp();
  return other;
}

static inline bool in_any_lane(bool x) { for (int m = 16; m; m >>= 1) x |= __shfl_xor_sync(0, x, m) != 0; return x; }
static inline u32 cycles() { return 0; }
static inline void wait_until(u32, u32) { give_way(); }

// ---- memory; an address that is not aligned is an error here too
static inline const void* aligned(const void* p, int size) {
  if ((size_t)p % size) { fprintf(stderr, "emulation: an address is not aligned to %d\n", size); abort(); }
  return p;
}
static inline u32 address(const void* p) { return (u32)((const char*)p - now->block->memory) + 1024; }
static inline char* at_shared(u32 a, int size) { return (char*)aligned(now->block->memory + (a - 1024), size); }
static inline uint4 shared16(u32 a) { uint4 v; memcpy(&v, at_shared(a, 16), 16); return v; }
static inline float2 shared8(u32 a) { float2 v; memcpy(&v, at_shared(a, 8), 8); return v; }
static inline u32 shared4(u32 a) { u32 v; memcpy(&v, at_shared(a, 4), 4); return v; }
static inline void to_shared4(u32 a, u32 v) { memcpy(at_shared(a, 4), &v, 4); }
static inline void to_shared8(u32 a, u32 v, u32 w) { to_shared4(a, v); to_shared4(at_shared(a, 8) ? a + 4 : 0, w); }
static inline uint4 exchanged16(const void* p) { uint4 v; memcpy(&v, aligned(p, 16), 16); return v; }
static inline u32 exchanged4(const void* p) { u32 v; memcpy(&v, aligned(p, 4), 4); return v; }
static inline void exchange4(void* p, u32 v) { idle = 0; memcpy((void*)aligned(p, 4), &v, 4); }
static inline void exchange8(void* p, u32 v, u32 w) { aligned(p, 8); exchange4(p, v); exchange4((char*)p + 4, w); }
static inline u32 given4(const void* p) { return exchanged4(p); }
static inline uint2 given8(const void* p) { uint2 v; memcpy(&v, aligned(p, 8), 8); return v; }
static inline u16 given2(const void* p) { u16 v; memcpy(&v, aligned(p, 2), 2); return v; }

// ---- numbers
static inline float exp2_fast(float x) { return exp2f(x); }
static inline float tanh_approximate(float x) { return tanhf(x); }
static inline float reciprocal(float x) { return 1.f / x; }
static inline float reciprocal_fast(float x) { return 1.f / x; }
static inline float to_bfloat16(float x) { const u32 a = __float_as_uint(x); return x != x ? x : __uint_as_float((a + 0x7fff + ((a >> 16) & 1)) & 0xffff0000u); }
static inline float to_float16(float x) { return (float)(_Float16)x; }
#if FORMAT == 2
static inline float half_as_float(u32 h) { _Float16 x; u16 s = h; memcpy(&x, &s, 2); return (float)x; }
static inline u32 half_of(float a) { _Float16 x = (_Float16)a; u16 s; memcpy(&s, &x, 2); return a != a ? 0x7fff : s; }
#else
static inline float half_as_float(u32 h) { return __uint_as_float(h << 16); }
static inline u32 half_of(float a) { const u32 x = __float_as_uint(a); return a != a ? 0x7fff : (x + 0x7fff + ((x >> 16) & 1)) >> 16; }
#endif
static inline u32 both_halves(float a, float b) { return half_of(a) | half_of(b) << 16; }
static inline u32 tf32(u32 x) { return (x & 0x7f800000) == 0x7f800000 ? x : (x + 0x1000) & 0xffffe000; }
static inline void multiply_add(float* c, const u32* a, u32 b0, u32 b1) {
  Warp& w = warp_of();
  const int lane = now->thread.x & 31, g = lane >> 2, t = lane & 3;
  memcpy(w.a[lane], a, 16);
  w.b[lane][0] = b0, w.b[lane][1] = b1;
  __syncwarp();
#if FORMAT == 0
  auto number = [](u32 r) { return __uint_as_float(r & 0xffffe000u); };
  auto left = [&](int row, int k) { return number(w.a[(row & 7) * 4 + (k & 3)][(row >= 8) + 2 * (k >= 4)]); };
  auto right = [&](int k, int column) { return number(w.b[column * 4 + (k & 3)][k >= 4]); };
  const int depth = 8;
#else
  auto number = [](u32 r, int k) { return half_as_float(k & 1 ? r >> 16 : r & 0xffff); };
  auto left = [&](int row, int k) { return number(w.a[(row & 7) * 4 + ((k & 7) >> 1)][(row >= 8) + 2 * (k >= 8)], k); };
  auto right = [&](int k, int column) { return number(w.b[column * 4 + ((k & 7) >> 1)][k >= 8], k); };
  const int depth = 16;
#endif
  for (int i = 0; i < 4; i++)
    for (int k = 0; k < depth; k++) c[i] += left(g + 8 * (i >= 2), k) * right(k, 2 * t + (i & 1));
  __syncwarp();
}

struct Args;
extern "C" void kernel(const Args);
template <class A> static void enter(u32 high, u32 low) {
  kernel(*(const A*)((size_t)high << 32 | low));
  now->done = true;
  idle = 0;
  swapcontext(&now->context, &scheduler);
}
template <class A> static int launch(const A* args, int blocks, int threads, int shared_bytes) {
  std::vector<Block> all(blocks);
  std::vector<Fiber> fibers(blocks * threads);
  block_size = threads, idle = 0;
  for (int b = 0; b < blocks; b++) {
    all[b] = {0, 0, std::vector<Warp>(threads / 32), (char*)aligned_alloc(128, (shared_bytes + 255) / 128 * 128)};
    memset(all[b].memory, 0xff, shared_bytes);  // NaN
  }
  const size_t stack = 256 << 10;
  for (int i = 0; i < blocks * threads; i++) {
    Fiber& f = fibers[i];
    f.block = &all[i / threads], f.index.x = i / threads, f.thread.x = i % threads, f.done = false;
    f.stack = (char*)malloc(stack);
    getcontext(&f.context);
    f.context.uc_stack.ss_sp = f.stack, f.context.uc_stack.ss_size = stack, f.context.uc_link = 0;
    makecontext(&f.context, (void (*)())enter<A>, 2, (u32)((size_t)args >> 32), (u32)(size_t)args);
  }
  int left = blocks * threads;
  unsigned long long chance = 88172645463325252ull;  // in another order at every turn: a race shows sooner or later
  while (left && idle < 3) {
    idle++;
    chance ^= chance << 13, chance ^= chance >> 7, chance ^= chance << 17;
    const int first = chance % fibers.size(), step = chance >> 32 & 1 ? 1 : (int)fibers.size() - 1;
    for (size_t i = 0; i < fibers.size(); i++) {
      Fiber& f = fibers[(first + i * step) % fibers.size()];
      if (f.done) continue;
      now = &f;
      swapcontext(&scheduler, &f.context);
      left -= f.done;
    }
  }
  for (Fiber& f : fibers) free(f.stack);
  for (Block& b : all) free(b.memory);
  return left;
}
