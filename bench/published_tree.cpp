/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Times the published tree's own C++ as `pkv bench sched` times ours: W + 100 prompts inserted, a
 * batch of 100 filled, then steps of finish + best + activate, each followed by an insertion of the
 * ended prompt under a new id. Its two files (chunked_hash_tree.cpp and .hpp of vLLM's pull request
 * 42134, csrc/cpu/scheduler/) are no part of this tree:
 *
 *   c++ -O3 -march=native -std=c++17 -I FOLDER bench/published_tree.cpp FOLDER/chunked_hash_tree.cpp
 *       -lxxhash -o published_tree
 *   published_tree WAITING TOKENS GROUPS|none|chain CHUNK STEPS SECONDS
 *
 * One line: microseconds of processor time of an insertion (p50), the batch of 100, a step (p50, p99, mean), steps.
 */
#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <random>
#include <vector>

#include "chunked_hash_tree.hpp"

namespace {

constexpr uint32_t batch = 100;

using times = std::vector<double>;

/* Of the processor, since calls take longer than the time slices of a busy machine. */
double now_us() {
  timespec used{};
  (void)clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
  return static_cast<double>(used.tv_sec) * 1e6 + static_cast<double>(used.tv_nsec) / 1e3;
}

double quantile(times t, double q) {
  std::sort(t.begin(), t.end());
  return t[static_cast<size_t>(q * static_cast<double>(t.size() - 1))];
}

/* Nine tenths from the prompt of its group; chain: any length of one common prompt. */
std::vector<uint32_t> prompt_of(uint32_t i, uint32_t tokens, const char *groups) {
  std::mt19937_64 draw(i);
  uint64_t source = 1;
  uint32_t shared = 0;
  if (std::strcmp(groups, "chain") == 0) {
    shared = static_cast<uint32_t>(draw() % tokens);
  } else if (std::strcmp(groups, "none") != 0) {
    source = 1 + draw() % std::strtoull(groups, nullptr, 10);
    shared = tokens / 10 * 9;
  }
  std::vector<uint32_t> prompt(tokens);
  std::mt19937_64 common(1000000007 * source), own(UINT64_C(77) + (uint64_t{i} << 20));
  for (uint32_t at = 0; at < tokens; at++)
    prompt[at] = static_cast<uint32_t>((at < shared ? common() : own()) % 128000);
  return prompt;
}

struct run {
  ChunkedHashTree tree;
  uint32_t requests;
  std::vector<std::vector<uint32_t>> prompts;
  std::vector<uint32_t> turn; /* request ids are turn * requests + prompt + 1; 0 means "none" */
  std::vector<uint32_t> in_batch;

  run(uint32_t waiting, uint32_t tokens, const char *groups, uint32_t chunk)
      : tree(chunk), requests(waiting + batch), turn(requests, 0) {
    for (uint32_t i = 0; i < requests; i++)
      prompts.push_back(prompt_of(i, tokens, groups));
  }

  double insert(uint32_t i) {
    const double start = now_us();
    tree.insert(turn[i] * requests + i + 1, prompts[i]);
    return now_us() - start;
  }

  /* Best and activate; what it took. */
  double take(uint32_t *id) {
    const double start = now_us();
    *id = std::get<0>(tree.find_best_request());
    tree.activate_request(*id);
    const double spent = now_us() - start;
    if (*id == 0) std::exit(1);
    return spent;
  }

  double step(uint32_t at) {
    const uint32_t ended = in_batch[at], i = (ended - 1) % requests;
    const double start = now_us();
    tree.finish_request(ended);
    const double finish = now_us() - start, taken = take(&in_batch[at]);
    turn[i]++;
    (void)insert(i);
    return finish + taken;
  }
};

}  // namespace

int main(int argc, char **argv) {
  if (argc != 7) return 2;
  const auto number = [&](int i) {
    return static_cast<uint32_t>(std::strtoul(argv[i], nullptr, 10));
  };
  run r(number(1), number(2), argv[3], number(4));
  times inserts, steps;
  double fill = 0;
  for (uint32_t i = 0; i < r.requests; i++)
    inserts.push_back(r.insert(i));
  r.in_batch.resize(batch);
  for (uint32_t &id : r.in_batch)
    fill += r.take(&id);
  const double start = now_us(), limit = 1e6 * std::strtod(argv[6], nullptr);
  while (steps.size() < number(5) && (steps.size() < 10 || now_us() - start < limit))
    steps.push_back(r.step(static_cast<uint32_t>(steps.size()) % batch));
  double sum = 0;
  for (double t : steps)
    sum += t;
  std::printf("%.3f %.3f %.3f %.3f %.3f %zu\n", quantile(inserts, 0.5), fill, quantile(steps, 0.5),
              quantile(steps, 0.99), sum / static_cast<double>(steps.size()), steps.size());
  return 0;
}
