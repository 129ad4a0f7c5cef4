// Runs ThreadTeam hard and says what went wrong; silent and 0 if nothing did. Built by test_team.py, once
// plainly and once under ThreadSanitizer.
#include <sys/wait.h>

#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <random>
#include <string>

#include "thread_team.h"

using namespace pageturner;

#define CHECK(condition)                                                  \
  do {                                                                    \
    if (!(condition)) {                                                   \
      std::fprintf(stderr, "line %d: not %s\n", __LINE__, #condition);    \
      std::exit(1);                                                       \
    }                                                                     \
  } while (false)

static std::atomic<int> sink{0};
static void work_for(int turns) {
  for (int i = 0; i < turns; i++) sink.fetch_add(1, std::memory_order_relaxed);
}

// Every piece runs once, and the next phase reads what this one wrote (plain memory).
static void phases(Team& team, int rounds, unsigned seed) {
  std::mt19937 random(seed);
  std::vector<int> values(512, 0), next(512), expected(512, 0);
  for (int round = 1; round <= rounds; round++) {
    const int count = random() % 4 ? random() % 12 : random() % 512, turns = random() % 40;
    const int slow = random() % 32 ? -1 : random() % 8;  // a piece whose thread loses its core
    team.for_each(count, [&](std::int64_t i) {
      if (i == slow) std::this_thread::sleep_for(std::chrono::microseconds(100));
      next[i] = values[(i + 1) % count] + 1;
      work_for(turns);
    });
    team.for_each(count, [&](std::int64_t i) { values[i] = next[i]; });
    const int first = expected[0];
    for (int i = 0; i < count; i++) expected[i] = (i + 1 < count ? expected[i + 1] : first) + 1;
    CHECK(values == expected);
    if (random() % 64 == 0) std::this_thread::sleep_for(std::chrono::microseconds(random() % 200));
  }
}

static void counts_are_exact(Team& team) {
  for (int count : {0, 1, 2, 3, 7, 1000, 100000}) {
    std::vector<std::atomic<int>> runs(count);
    team.for_each(count, [&](std::int64_t i) { runs[i]++; });
    for (auto& run : runs) CHECK(run == 1);
  }
  for (int count : {0, 1, 5, 64, 1001})
    for (int least : {1, 3, 64, 5000}) {
      std::vector<std::atomic<int>> runs(count);
      team.for_each_stretch(count, least, [&](std::int64_t begin, std::int64_t end) {
        for (; begin < end; begin++) runs[begin]++;
      });
      for (auto& run : runs) CHECK(run == 1);
    }
}

// Claims of two threads must meet for one to be given twice: goes on until so many pieces ran on another thread than
// the one before, however long a single thread has the cores. A bounded number of rounds, where there is but one core.
static void claims_that_meet_are_exact() {
  constexpr int COUNT = 100000, MEETINGS = 50000, MOST_ROUNDS = 500;
  ThreadTeam team(2);
  const auto caller = std::this_thread::get_id();
  std::vector<std::atomic<int>> runs(COUNT);
  std::vector<char> on_caller(COUNT);
  for (int round = 1, met = 0; met < MEETINGS && round <= MOST_ROUNDS; round++) {
    team.for_each(COUNT, [&](std::int64_t i) {
      CHECK(++runs[i] == round);  // at once: a caller that counts its pieces wrong may wait for ever
      on_caller[i] = std::this_thread::get_id() == caller;
    });
    for (int i = 1; i < COUNT; i++) met += on_caller[i] != on_caller[i - 1];
  }
}

// Two pieces that meet, hence on two threads; the other thread's takes long after the caller's is done.
static void the_caller_waits_for_claimed_pieces(Team& team) {
  const auto caller = std::this_thread::get_id();
  std::atomic<int> met{0};
  int written[2] = {};
  team.for_each(2, [&](std::int64_t i) {
    met++;
    while (met < 2) std::this_thread::sleep_for(std::chrono::microseconds(10));
    if (std::this_thread::get_id() != caller) std::this_thread::sleep_for(std::chrono::milliseconds(20));
    written[i] = 1;
  });
  CHECK(written[0] && written[1]);
}

static void pieces_may_use_the_team(Team& team) {
  std::atomic<int> runs{0};
  team.for_each(8, [&](std::int64_t) { team.for_each(5, [&](std::int64_t) { runs++; }); });
  CHECK(runs == 40);
}

static void callers_may_meet(Team& team) {
  std::vector<std::thread> callers;
  for (unsigned seed = 0; seed < 3; seed++) callers.emplace_back([&team, seed] { phases(team, 300, seed); });
  for (auto& caller : callers) caller.join();
}

static void teams_come_and_go() {
  for (int i = 0; i < 60; i++) {
    ThreadTeam team(1 + i % 5);
    if (i % 3) phases(team, i % 7, i);
    if (i % 4 == 0) std::this_thread::sleep_for(std::chrono::microseconds(120));  // until they sleep
  }
}

#if !defined(__SANITIZE_THREAD__)
// A fork in the middle of phases: the child's team works, and ends, without the threads it lost.
static void a_fork_loses_no_work() {
  for (int i = 0; i < 10; i++) {
    auto team = std::make_unique<ThreadTeam>(3);
    std::atomic<bool> enough{false};
    std::thread other([&] {
      while (!enough) phases(*team, 1, i);
    });
    std::this_thread::sleep_for(std::chrono::microseconds(50 * i));
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
      phases(*team, 50, i);
      team.reset();
      _exit(0);
    }
    int status = -1;
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    enough = true;
    other.join();
  }
}

// The states of all threads but the caller, such as "SS": read from the system.
static std::string states_of_others() {
  std::string states;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    if (task.path().filename() == std::to_string(gettid())) continue;
    std::ifstream file(task.path() / "stat");
    const std::string stat(std::istreambuf_iterator<char>(file), {});
    states += stat[stat.rfind(')') + 2];
  }
  return states;
}

static void idle_threads_sleep() {
  ThreadTeam team(4);
  team.for_each(100, [](std::int64_t) { work_for(10); });
  for (int i = 0; i < 300 && states_of_others() != "SSS"; i++)
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  CHECK(states_of_others() == "SSS");
}

#endif

int main(int count, char** names) {
  const int rounds = count > 1 ? std::atoi(names[1]) : 2000;
#if !defined(__SANITIZE_THREAD__)  // under which so many claims take minutes
  claims_that_meet_are_exact();
#endif
  for (int size : {1, 2, 3, 8}) {
    ThreadTeam team(size);
    CHECK(team.size() == size);
    phases(team, rounds, size);
    counts_are_exact(team);
    if (size > 1) the_caller_waits_for_claimed_pieces(team);
    pieces_may_use_the_team(team);
    callers_may_meet(team);
  }
  teams_come_and_go();
#if !defined(__SANITIZE_THREAD__)  // it does not follow threads through a fork
  a_fork_loses_no_work();
  idle_threads_sleep();  // it has a thread of its own
#endif
}
