// The scheduler behind cuda_on_cpu.h.
#include <link.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <sys/mman.h>

#include <atomic>
#include <chrono>
#include <deque>
#include <map>
#include <thread>

#include "cuda_on_cpu.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#define ANNOTATED 1
#else
#define ANNOTATED 0
#endif

namespace harness {
namespace {
const size_t STACK = 128 << 10;
const auto PATIENCE = std::chrono::seconds(60);

enum State { READY, AT_BARRIER, IN_WARP, DONE };

// The lanes of one mask, waiting for each other again and again. What they bring is kept for two
// meetings, so that a lane may still read the last one's while others are at the next.
struct Meeting {
    unsigned arrived = 0;
    uint64_t round = 0;
    uint64_t brought[2][32];
};
}  // namespace

struct Fiber {
    ucontext_t context;
    jmp_buf place;
    bool begun = false;
    void* stack = nullptr;
    void* fake = nullptr;
    State state = READY;
    Index index;
};

struct Block {
    Fiber* fibers = nullptr;
    unsigned size = 0, grid = 0, waiting = 0, done = 0;
    Index index;
    Fiber* current = nullptr;
    Fiber home;
    const void* home_bottom = nullptr;
    size_t home_size = 0;
    std::vector<unsigned> ready;
    std::deque<unsigned> in_order;
    std::map<std::pair<unsigned, unsigned>, Meeting> meetings;
    uint64_t random = 0;
    bool shuffled = false;
    std::string error;
    std::atomic<bool>* stop = nullptr;
    std::chrono::steady_clock::time_point began;
    unsigned spins = 0;
    void (*body)(void*) = nullptr;
    void* what = nullptr;

    uint64_t draw() {
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        return random;
    }
    void make_ready(unsigned thread) {
        fibers[thread].state = READY;
        if (shuffled) {
            ready.push_back(thread);
        } else {
            in_order.push_back(thread);
        }
    }
    bool next(unsigned& thread) {
        if (shuffled) {
            if (ready.empty()) return false;
            std::swap(ready[draw() % ready.size()], ready.back());
            thread = ready.back();
            ready.pop_back();
        } else {
            if (in_order.empty()) return false;
            thread = in_order.front();
            in_order.pop_front();
        }
        return true;
    }
};

namespace {
// Not thread-local by declaration: such storage is what `poison` fills.
pthread_key_t key;
pthread_once_t once = PTHREAD_ONCE_INIT;
void make_key() { pthread_key_create(&key, nullptr); }
Block* block() { return (Block*)pthread_getspecific(key); }

void fiber_main();

// From one fiber to another. setjmp goes without the two system calls of swapcontext, but
// AddressSanitizer has to be told of a change of stacks and knows swapcontext.
void change(Block* b, Fiber& from, Fiber& to, bool final) {
#if ANNOTATED
    const bool home = &to == &b->home;
    __sanitizer_start_switch_fiber(final ? nullptr : &from.fake,
                                   home ? b->home_bottom : to.stack, home ? b->home_size : STACK);
    swapcontext(&from.context, &to.context);
    __sanitizer_finish_switch_fiber(from.fake, nullptr, nullptr);
#else
    (void)b;
    (void)final;
    if (_setjmp(from.place) == 0) {
        if (to.begun) {
            _longjmp(to.place, 1);
        } else {
            to.begun = true;
            setcontext(&to.context);
        }
    }
#endif
}

void to_scheduler(bool final = false) {
    Block* b = block();
    change(b, *b->current, b->home, final);
}

// What the scheduler sees next is the end of this block.
[[noreturn]] void fail(const std::string& what) {
    Block* b = block();
    if (b->error.empty()) {
        char place[80];
        snprintf(place, sizeof place, "block %u, thread %u: ", b->index.x, b->current->index.x);
        b->error = place + what;
    }
    for (;;) to_scheduler();
}

void fiber_main() {
    Block* b = block();
#if ANNOTATED
    __sanitizer_finish_switch_fiber(nullptr, &b->home_bottom, &b->home_size);
#endif
    b->body(b->what);
    if (b->waiting) fail("ended while others wait at __syncthreads");
    b->current->state = DONE;
    ++b->done;
    for (;;) to_scheduler(true);
}

// This library's thread-local storage, that is its shared memory, filled with what no kernel wants.
int poison(struct dl_phdr_info* info, size_t, void* own) {
    bool ours = false;
    size_t size = 0;
    for (int i = 0; i < info->dlpi_phnum; ++i) {
        const auto& header = info->dlpi_phdr[i];
        const auto start = info->dlpi_addr + header.p_vaddr;
        if (header.p_type == PT_LOAD && (uintptr_t)own >= start &&
            (uintptr_t)own < start + header.p_memsz) {
            ours = true;
        }
        if (header.p_type == PT_TLS) size = header.p_memsz;
    }
    if (ours && info->dlpi_tls_data) memset(info->dlpi_tls_data, 0xff, size);
    return ours;
}
// So that there is such storage in this thread before a kernel first touches it.
thread_local volatile int touch;

void run_block(Block& b) {
    pthread_setspecific(key, &b);
    touch = 1;
    dl_iterate_phdr(poison, (void*)&run_block);
    b.ready.clear();
    b.in_order.clear();
    b.meetings.clear();
    b.waiting = b.done = b.spins = 0;
    b.began = std::chrono::steady_clock::now();
#if ANNOTATED
    // Fibers end without returning, which leaves marks on their stacks.
    __asan_unpoison_memory_region(b.fibers[0].stack, STACK * b.size);
#endif
    for (unsigned i = 0; i < b.size; ++i) {
        Fiber& fiber = b.fibers[i];
        fiber.begun = false;
        fiber.fake = nullptr;
        fiber.index.x = i;
        getcontext(&fiber.context);
        fiber.context.uc_stack.ss_sp = fiber.stack;
        fiber.context.uc_stack.ss_size = STACK;
        fiber.context.uc_link = nullptr;
        makecontext(&fiber.context, fiber_main, 0);
        b.make_ready(i);
    }
    unsigned thread;
    b.home.begun = true;
    while (b.error.empty() && b.next(thread)) {
        b.current = &b.fibers[thread];
        change(&b, b.home, *b.current, false);
    }
    if (b.error.empty() && b.done != b.size) {
        b.error = "block " + std::to_string(b.index.x) + ": " + std::to_string(b.size - b.done) +
                  " threads wait for others that never come (" + std::to_string(b.waiting) +
                  " of them at __syncthreads)";
    }
}
}  // namespace

const Index& thread_index() { return block()->current->index; }
const Index& block_index() { return block()->index; }
unsigned block_size() { return block()->size; }
unsigned grid_size() { return block()->grid; }
unsigned lane() { return thread_index().x & 31; }

void block_barrier() {
    Block* b = block();
    if (b->done) fail("reached __syncthreads after others ended");
    b->current->state = AT_BARRIER;
    if (++b->waiting == b->size) {
        b->waiting = 0;
        for (unsigned i = 0; i < b->size; ++i) b->make_ready(i);
    }
    to_scheduler();
}

const uint64_t* meet(unsigned mask, uint64_t value) {
    Block* b = block();
    const unsigned warp = b->current->index.x / 32, own = lane();
    if (!(mask >> own & 1)) fail("warp operation whose mask lacks the calling lane");
    for (unsigned i = 0; i < 32; ++i) {
        const unsigned thread = warp * 32 + i;
        if ((mask >> i & 1) && (thread >= b->size || b->fibers[thread].state == DONE)) {
            fail("warp operation with lane " + std::to_string(i) + ", which has ended");
        }
    }
    Meeting& meeting = b->meetings[{warp, mask}];
    const uint64_t round = meeting.round;
    meeting.brought[round & 1][own] = value;
    meeting.arrived |= 1u << own;
    b->current->state = IN_WARP;
    if (meeting.arrived == mask) {
        meeting.arrived = 0;
        ++meeting.round;
        for (unsigned i = 0; i < 32; ++i) {
            if (mask >> i & 1) b->make_ready(warp * 32 + i);
        }
    }
    to_scheduler();
    return meeting.brought[round & 1];
}

void give_way() {
    Block* b = block();
    if (*b->stop) fail("another block failed");
    if (++b->spins % 1024 == 0) {
        sched_yield();
        if (std::chrono::steady_clock::now() - b->began > PATIENCE) {
            fail("waited for another block for a minute");
        }
    }
    b->make_ready(b->current->index.x);
    to_scheduler();
}

void before_atomic() {
    Block* b = block();
    if (b->shuffled && b->draw() % 4 == 0) {
        b->make_ready(b->current->index.x);
        to_scheduler();
    }
}

int run(const Options& options, unsigned grid, unsigned size, void (*body)(void*), void* what,
        std::string& error) {
    pthread_once(&once, make_key);
    std::atomic<unsigned> taken(0);
    std::atomic<bool> stop(false);
    std::vector<std::string> errors(options.workers);
    auto work = [&](unsigned worker) {
        Block b;
        b.size = size;
        b.grid = grid;
        b.shuffled = options.seed != 0;
        b.stop = &stop;
        b.body = body;
        b.what = what;
        b.fibers = new Fiber[size];
        char* stacks = (char*)mmap(nullptr, STACK * size, PROT_READ | PROT_WRITE,
                                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        for (unsigned i = 0; i < size; ++i) b.fibers[i].stack = stacks + i * STACK;
        for (unsigned at; !stop && (at = taken++) < grid;) {
            // A GPU promises no order of blocks.
            b.index.x = options.seed ? grid - 1 - at : at;
            b.random = options.seed * 0x9e3779b97f4a7c15ull + b.index.x + 1;
            for (int i = 0; i < 8; ++i) b.draw();
            run_block(b);
            if (!b.error.empty()) {
                errors[worker] = b.error;
                stop = true;
            }
        }
#if ANNOTATED
        __asan_unpoison_memory_region(stacks, STACK * size);
#endif
        munmap(stacks, STACK * size);
        delete[] b.fibers;
    };
    std::vector<std::thread> threads;
    for (unsigned i = 0; i < options.workers; ++i) threads.emplace_back(work, i);
    for (auto& thread : threads) thread.join();
    for (auto& found : errors) {
        if (error.empty() || error.find("another block") != std::string::npos) {
            if (!found.empty()) error = found;
        }
    }
    return !error.empty();
}
}  // namespace harness
