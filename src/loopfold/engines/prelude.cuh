// What every generated kernel begins with. FORMAT is 0 for float32, 1 for bfloat16, 2 for float16: of products, and of
// what blocks exchange. STORED is that of all that lies in memory besides: the same, or float32.
typedef unsigned int u32;
typedef unsigned short u16;

#ifdef EMULATED
#include "emulation.h"
#else
#define DEV __device__ __forceinline__
#define OUTLINED __device__ __noinline__  // code that runs once: short to compile rather than fast
#define KERNEL extern "C" __global__ void __launch_bounds__(THREADS, 1)
#define SHARED extern __shared__ __align__(128) char shared[];
#define YIELD
#define INF __int_as_float(0x7f800000)
#define NAN __int_as_float(0x7fffffff)

// Shared memory goes by its own 32-bit addresses, which spare instructions.
DEV u32 address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
DEV uint4 shared16(u32 a) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(a));
  return v;
}
DEV float2 shared8(u32 a) { float2 v; asm volatile("ld.shared.v2.f32 {%0,%1},[%2];" : "=f"(v.x), "=f"(v.y) : "r"(a)); return v; }
DEV u32 shared4(u32 a) { u32 v; asm volatile("ld.shared.u32 %0,[%1];" : "=r"(v) : "r"(a)); return v; }
DEV void to_shared4(u32 a, u32 v) { asm volatile("st.shared.u32 [%0],%1;" ::"r"(a), "r"(v) : "memory"); }
DEV void to_shared8(u32 a, u32 v, u32 w) { asm volatile("st.shared.v2.u32 [%0],{%1,%2};" ::"r"(a), "r"(v), "r"(w) : "memory"); }

// What other blocks write is read past the first-level cache; nothing orders one word after another, and nothing needs to.
DEV uint4 exchanged16(const void* p) {
  uint4 v;
  asm volatile("ld.relaxed.gpu.global.v4.u32 {%0,%1,%2,%3},[%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
  return v;
}
DEV u32 exchanged4(const void* p) { u32 v; asm volatile("ld.relaxed.gpu.global.u32 %0,[%1];" : "=r"(v) : "l"(p) : "memory"); return v; }
DEV void exchange4(void* p, u32 v) { asm volatile("st.relaxed.gpu.global.u32 [%0],%1;" ::"l"(p), "r"(v) : "memory"); }
DEV void exchange8(void* p, u32 v, u32 w) { asm volatile("st.relaxed.gpu.global.v2.u32 [%0],{%1,%2};" ::"l"(p), "r"(v), "r"(w) : "memory"); }

// What no block of this launch writes.
DEV u32 given4(const void* p) { u32 v; asm volatile("ld.global.nc.L1::no_allocate.u32 %0,[%1];" : "=r"(v) : "l"(p)); return v; }
DEV uint2 given8(const void* p) { uint2 v; asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0,%1},[%2];" : "=r"(v.x), "=r"(v.y) : "l"(p)); return v; }
DEV u16 given2(const void* p) { u16 v; asm volatile("ld.global.nc.u16 %0,[%1];" : "=h"(v) : "l"(p)); return v; }

DEV u32 cycles() { return clock(); }
DEV void wait_until(u32 since, u32 delay) { while (cycles() - since < delay) ; }
DEV bool in_any_lane(bool x) { return __any_sync(0xffffffffu, x); }

DEV float exp2_fast(float x) { float y; asm("ex2.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x)); return y; }
DEV float tanh_approximate(float x) { float y; asm("tanh.approx.f32 %0,%1;" : "=f"(y) : "f"(x)); return y; }
DEV float reciprocal(float x) { float y; asm("rcp.approx.f32 %0,%1;" : "=f"(y) : "f"(x)); return y; }  // however small
DEV float reciprocal_fast(float x) { float y; asm("rcp.approx.ftz.f32 %0,%1;" : "=f"(y) : "f"(x)); return y; }

// c[16 features × 8 sequences] += weights[16 × k] · rows[k × 8], k = 8 for float32 (as TF32) and 16 otherwise.
DEV void multiply_add(float* c, const u32* a, u32 b0, u32 b1) {
#if FORMAT == 0
  asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
#elif FORMAT == 1
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
#else
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
#endif
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
DEV u32 tf32(u32 x) { u32 r; asm("cvt.rna.tf32.f32 %0,%1;" : "=r"(r) : "f"(__uint_as_float(x))); return r; }
DEV u32 both_halves(float a, float b) {
  u32 r;
#if FORMAT == 1
  asm("cvt.rn.bf16x2.f32 %0,%1,%2;" : "=r"(r) : "f"(b), "f"(a));
#else
  asm("cvt.rn.f16x2.f32 %0,%1,%2;" : "=r"(r) : "f"(b), "f"(a));
#endif
  return r;
}
DEV float to_bfloat16(float x) {  // two halves are a float32: the number, and zeros
  u32 r;
  asm("cvt.rn.bf16x2.f32 %0,%1,%2;" : "=r"(r) : "f"(x), "f"(0.f));
  return __uint_as_float(r);
}
DEV float to_float16(float x) {
  float y;
  asm("{.reg .b16 h; cvt.rn.f16.f32 h,%1; cvt.f32.f16 %0,h;}" : "=f"(y) : "f"(x));
  return y;
}
DEV float half_as_float(u32 h) {
#if FORMAT == 1
  return __uint_as_float(h << 16);
#else
  float f;
  asm("{.reg .b16 x; cvt.u16.u32 x,%1; cvt.f32.f16 %0,x;}" : "=f"(f) : "r"(h));
  return f;
#endif
}
#endif

// ---- the exchange: memory is filled with ones beforehand; a word that is still all ones has not been written

#define MISSING 0xFFFFFFFFu
#define PATIENCE (1u << 23)  // looks at a word that does not come: some seconds
// whether to look again. Having given up once, a thread waits no more, and the host is told
#define WAIT(looks) (!lost && (++looks < PATIENCE || (lost = true, *A.error = 1, false)))
// Who looks too early looks twice, and looking slows the writers down. So every warp learns when words come: the delay
// before its first look, in sixteenths of a cycle, grows after a look in vain and shrinks slowly after any other
#define LATER 256u
#define EARLIER 16u
#define LATEST 65536u
DEV u32 learnt(u32 delay, bool in_vain) {
  return in_vain ? delay + (delay < LATEST ? LATER : 0u) : delay - (delay > EARLIER ? EARLIER : delay);
}
DEV bool missing(const uint4& v) {
  const u32 a = v.x > v.y ? v.x : v.y, b = v.z > v.w ? v.z : v.w;
  return (a > b ? a : b) == MISSING;
}
DEV u32 word(float x) { return x != x ? 0x7fffffffu : __float_as_uint(x); }  // one NaN, which is not all ones

// ---- pairs of numbers in memory

struct Pair { float a, b; };
#if STORED == 0
typedef uint2 Raw;
DEV Pair decode(Raw v) { return {__uint_as_float(v.x), __uint_as_float(v.y)}; }
DEV Raw load_pair(const char* p) { return given8(p); }
DEV Raw load_each(const char* p, bool two) { Raw v; v.x = given4(p); v.y = two ? given4(p + 4) : 0u; return v; }
DEV float load_one(const char* p) { return __uint_as_float(given4(p)); }
DEV void store_pair(char* p, float a, float b) { *(float2*)p = make_float2(a, b); }
DEV void store_one(char* p, float a) { *(float*)p = a; }
#else
typedef u32 Raw;
DEV Pair decode(Raw v) { return {half_as_float(v & 0xffffu), half_as_float(v >> 16)}; }
DEV Raw load_pair(const char* p) { return given4(p); }
DEV Raw load_each(const char* p, bool two) { return (u32)given2(p) | (two ? (u32)given2(p + 2) << 16 : 0u); }
DEV float load_one(const char* p) { return half_as_float(given2(p)); }
DEV void store_pair(char* p, float a, float b) { *(u32*)p = both_halves(a, b); }
DEV void store_one(char* p, float a) { *(u16*)p = (u16)both_halves(a, a); }
#endif

// ---- and in an exchange

#if FORMAT == 0
#define BYTES 4
DEV void publish(char* p, float a, float b) { exchange8(p, word(a), word(b)); }
DEV void publish(u32 p, float a, float b) { to_shared8(p, __float_as_uint(a), __float_as_uint(b)); }
DEV float number(u32 w, u32) { return __uint_as_float(w); }
// the two parts of a number that TF32 can hold: an exact product is three, without that of both low parts
DEV u32 high(u32 x) { return x & 0xffffe000u; }
DEV u32 low(u32 x) {
  const float rest = __uint_as_float(x) - __uint_as_float(high(x));
  return rest != rest ? 0u : __float_as_uint(rest);  // of an infinity nothing is left
}
#else
#define BYTES 2
DEV void publish(char* p, float a, float b) { exchange4(p, both_halves(a, b)); }
DEV void publish(u32 p, float a, float b) { to_shared4(p, both_halves(a, b)); }
DEV float number(u32 w, u32 at) { return half_as_float(at & 2 ? w >> 16 : w & 0xffffu); }
#endif

// ---- where a number of a row lies in its exchange: chunks of 8 rows × 64 bytes, in which owners have OWN features each

#define PER_CHUNK (64 / BYTES)
template <int CHUNKS, int SIZE, int OWN> DEV u32 place(int row, int chunk, int k) {
  return ((row >> 3) * CHUNKS + chunk + k / PER_CHUNK) * SIZE + ((k % PER_CHUNK / OWN) * 8 + (row & 7)) * OWN * BYTES + k % OWN * BYTES;
}

// ---- functions that recurrences are full of: to the bits that their format has, without branches or divisions

#if STORED == 0
DEV float tanh_fast(float x) {
  const float s = x * x, far = 1.f - 2.f * reciprocal_fast(exp2_fast(2.885390082f * fabsf(x)) + 1.f);
  float near = -5.8951364e-3f;  // (tanh x - x) / x³ as a polynomial of x², below 0.6
  near = near * s + 2.0795953e-2f, near = near * s - 5.3783823e-2f;
  near = near * s + 1.3331924e-1f, near = near * s - 3.3333299e-1f;
  return copysignf(fabsf(x) < 0.6f ? near * s * x + x : far, x);
}
DEV float sigmoid_fast(float x) { return reciprocal(1.f + expf(-x)); }
#elif STORED == 1
DEV float tanh_fast(float x) { return tanh_approximate(x); }  // to 11 bits
#else
DEV float tanh_fast(float x) {
  return copysignf(1.f - 2.f * reciprocal_fast(exp2_fast(2.885390082f * fabsf(x)) + 1.f), x);
}
#endif
#if STORED
DEV float sigmoid_fast(float x) { return reciprocal_fast(1.f + exp2_fast(-1.442695041f * x)); }
#endif
