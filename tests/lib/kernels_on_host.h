// kernels.cu as a library for a host, which runs blocks and the threads of a block one after another. A thread runs
// until it synchronizes with its warp or ends; then the next one runs. A missing synchronization therefore reads data
// that other threads have not written yet.

#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <type_traits>
#include <utility>
#include <vector>

#define __device__
#define __global__
#define __shared__ static
#define __launch_bounds__(threads)

using std::min;

struct Index {
    unsigned x;
};
static Index blockIdx, threadIdx;

// ---- numbers ----

static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
static inline unsigned __umulhi(unsigned a, unsigned b) { return (unsigned long long)a * b >> 32; }

template <typename To, typename From>
static inline To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof(to));
    return to;
}
static inline unsigned __float_as_uint(float value) { return bits_as<unsigned>(value); }
static inline float __uint_as_float(unsigned bits) { return bits_as<float>(bits); }

// With the largest error that a GPU may have, upwards or downwards.
static inline float reciprocal(float x) { return 1 / x * (__float_as_uint(x) & 1 ? 1 + 0x1p-22f : 1 - 0x1p-22f); }

// ---- threads ----

static ucontext_t scheduler, fibres[THREADS];
static bool done[THREADS];
static std::function<void()> body;

static inline void __syncwarp() { swapcontext(&fibres[threadIdx.x], &scheduler); }

static void run_thread() {
    body();
    done[threadIdx.x] = true;
    swapcontext(&fibres[threadIdx.x], &scheduler);
}

static void run_block(bool backwards) {
    constexpr size_t STACK = 1 << 16;
    static std::vector<char> stacks(THREADS * STACK);
    for (size_t i = 0; i < THREADS; ++i) {
        done[i] = false;
        getcontext(&fibres[i]);
        fibres[i].uc_stack.ss_sp = &stacks[i * STACK];
        fibres[i].uc_stack.ss_size = STACK;
        makecontext(&fibres[i], run_thread, 0);
    }
    while (!std::all_of(done, done + THREADS, [](bool one) { return one; }))
        for (unsigned i = 0; i < THREADS; ++i) {
            threadIdx.x = backwards ? THREADS - 1 - i : i;
            if (!done[threadIdx.x]) swapcontext(&scheduler, &fibres[threadIdx.x]);
        }
}

template <typename T>
static T argument(long long value) {
    if constexpr (std::is_pointer_v<T>)
        return reinterpret_cast<T>(value);
    else
        return static_cast<T>(value);
}

template <typename... T, size_t... I>
static void run(void (*kernel)(T...), int blocks, bool backwards, const long long *all, std::index_sequence<I...>) {
    body = [=] { kernel(argument<T>(all[I])...); };
    for (int i = 0; i < blocks; ++i) {
        blockIdx.x = backwards ? blocks - 1 - i : i;
        run_block(backwards);
    }
}

template <typename... T>
static void run(void (*kernel)(T...), int blocks, bool backwards, const long long *arguments) {
    run(kernel, blocks, backwards, arguments, std::index_sequence_for<T...>());
}

// Define the function `symbol` of the library, which runs a kernel.
#define EXPORT(symbol, ...) \
    extern "C" void symbol(int blocks, bool backwards, const long long *arguments) { \
        run(&__VA_ARGS__, blocks, backwards, arguments); \
    }

#include "kernels.cu"

static inline float to_float(Half h) { return bits_as<_Float16>(h.bits); }
static inline void from_float(float value, Half &h) { h.bits = bits_as<unsigned short>((_Float16)value); }
