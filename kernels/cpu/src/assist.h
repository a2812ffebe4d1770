// The base model's side of a step that uses adapters which are still being copied to the device.
//
// At the start of every layer the progress of a slot's copy decides where the low-rank part of its rows is computed:
//
//   device     the layer is present (loaded_layers[slot] > layer): like any other row, from the pool's pages
//   process    a CPU process computes y' = scale * B (A x) from host memory while the base computes x W; y += y'
//   in place   no process can (none is alive or has room, one failed, or the copy is late): the base computes the row from
//              host memory, with the code of the device path and a page table that points there
//
// A slot in mode "layer-wise" waits for its copy: its rows are computed on the device, or in place if the wait takes too long.
//
// Member 0 of the team calls begin_layer between two barriers; the decision holds for the layer. A member that waits for a process
// detects its failure; then all members compute the rows of that request in place (`repair`).
#pragma once
#include "channel.h"

namespace motet {

class AssistStep {
 public:
  // Once per step, before the team runs. Leaves the plan of all rows in `lora`: the plan of a layer never needs more memory.
  void begin(const Model& model, const Step& step, int64_t element_bytes, int team, LoraPlan& lora) {
    assist_ = step.assist, step_ = &step, lora_ = &lora, element_bytes_ = element_bytes, team_ = team;
    pool_ = model.pool;
    device_table_ = pool_.table;
    table_.assign(pool_.table, pool_.table + pool_.slots * MODULES * pool_.max_pages);
    pool_.table = table_.data();
    broken_.store(-1);
    waited_ns_ = 0;
    lora.build(pool_, step.row_slot, step.rows, element_bytes, team);
    at_.assign(assist_->count, DEVICE);
    divide();
  }

  const Pool& pool() const { return pool_; }
  // Pieces of work with the rows that processes compute in this layer.
  int64_t batches(int group) const { return ((int64_t)rows_[group].size() + BATCH - 1) / BATCH; }

  void begin_layer(int64_t layer) {
    for (int64_t i = 0; i < assist_->count; ++i)
      if (assist_->loading[i].layerwise) wait_for(assist_->loading[i].slot, layer);
    place(layer);
    for (int64_t i = 0; i < assist_->count; ++i) {
      int64_t processed = 0;
      for (const Slice& slice : slices_)
        if (slice.loading == i && slice.on) processed += slice.rows;
      assist_->by_processes += processed;
      (at_[i] == DEVICE ? assist_->on_device : assist_->in_place) += rows_of_[i] - processed;
    }
  }

  // Copies some rows of x to the processes' memory; when all rows are there, publishes the requests.
  template <class A>
  void hand_over(int64_t batch, int group, const A* x, int64_t ldx) {
    const int64_t bytes = pool_.in[GROUP_START[group]] * sizeof(A), end = last_of(batch, group);
    for (int64_t i = batch * BATCH; i < end; ++i) {
      const Row& row = rows_[group][i];
      memcpy((void*)channel_x<A>(assist_->channel[row.channel]->h, group, row.at), x + row.row * ldx, bytes);
    }
  }
  void publish(int64_t layer, int group) {
    for (const Request& request : requests_[group]) {
      const double expected_ns = assist_->read_ns * (double)request.work.elements + assist_->row_ns * (double)request.work.row_elements;
      const int64_t late_ns = (int64_t)(LATE_FACTOR * expected_ns);
      assist_->channel[request.channel]->publish(layer, group, request.slices, request.work, assist_->watchdog_ns + late_ns);
    }
  }

  // Waits for the processes' results and adds them to some rows of y.
  template <class A>
  void collect(int64_t batch, int64_t layer, int group, float* y, int64_t ldy) {
    const int64_t out = group_out(pool_.out, group), end = last_of(batch, group);
    for (int64_t i = batch * BATCH; i < end; ++i) {
      const Row& row = rows_[group][i];
      Channel& channel = *assist_->channel[row.channel];
      if (!channel.await()) {
        broken_.store(layer * GROUPS + group);
        continue;
      }
      const A* from = channel_y<A>(channel.h, group, row.at);
      float* to = y + row.row * ldy;
      for (int64_t n = 0; n < out; n += W) {
        const int live = (int)std::min<int64_t>(W, out - n);
        store_n(to + n, load_n(to + n, live) + load_n(from + n, live), live);
      }
    }
  }

  // Whether a process failed in this request: the same answer for every member behind the barrier.
  bool broken(int64_t layer, int group) const { return broken_.load() == layer * GROUPS + group; }

  // The plan for the rows of failed requests; the rest of the layer goes on without the processes that failed.
  const LoraPlan& repair(int64_t layer, int group) {
    row_slot_.assign(step_->rows, -1);
    for (const Row& row : rows_[group])
      if (assist_->channel[row.channel]->failed_request()) {
        row_slot_[row.row] = step_->row_slot[row.row];
        ++assist_->repaired;
      }
    repair_.build(pool_, row_slot_.data(), step_->rows, element_bytes_, team_);
    place(layer);
    return repair_;
  }
  const LoraPlan& repair_plan() const { return repair_; }

  // For a base that runs its own layers, such as a GPU: divides rows among processes and returns the number of slices.
  // `slices` [channels * MAX_SLICES, 6]: index of the adapter in `assist`, channel, slice number in the channel, first row in the
  // channel, first index in `rows`, number of rows. `rows` [step.rows]: rows of the step.
  int64_t division(Assist* assist, const Step& step, int32_t* slices, int32_t* rows) {
    assist_ = assist, step_ = &step;
    divide();
    for (const Slice& one : slices_)
      for (int32_t value : {one.loading, one.channel, one.number, one.at_row, one.first, one.rows}) *slices++ = value;
    std::copy(sliced_.begin(), sliced_.end(), rows);
    return (int64_t)slices_.size();
  }

 private:
  enum Place { DEVICE, HOST };
  static constexpr int BATCH = 8;           // rows of one piece of work
  static constexpr double LATE_FACTOR = 8;  // times what a request is expected to take
  struct Row {
    int32_t row, at, channel;  // row of the step; row of the channel
  };
  struct Request {  // to one channel in one group
    int32_t channel;
    uint32_t slices;
    Work work;
  };
  struct Slice {  // rows of one adapter that one process takes
    int32_t loading, channel, number;  // number: among the channel's slices
    int32_t first, rows, at_row;       // first: of sliced_; at_row: of the channel
    int64_t elements[GROUPS];          // of the adapter's pages of one layer
    bool on;                           // whether its process computes this layer
  };

  int64_t last_of(int64_t batch, int group) const { return std::min<int64_t>((batch + 1) * BATCH, rows_[group].size()); }
  int32_t loaded(int32_t slot) const { return __atomic_load_n(pool_.loaded_layers + slot, __ATOMIC_ACQUIRE); }

  // Divides rows among processes: ceil(rows / c) processes per adapter, the least loaded ones first.
  void divide() {
    const Assist& a = *assist_;
    slices_.clear(), sliced_.clear(), rows_of_.assign(a.count, 0);
    load_.assign(a.channels, 0), used_.assign(a.channels, 0);
    for (int64_t c = 0; c < a.channels; ++c) a.channel[c]->begin_step();
    for (int64_t i = 0; i < a.count; ++i) {
      const Loading& loading = a.loading[i];
      const int32_t first = (int32_t)sliced_.size();
      for (int64_t r = 0; r < step_->rows; ++r)
        if (step_->row_slot[r] == loading.slot) sliced_.push_back((int32_t)r);
      const int64_t rows = rows_of_[i] = (int64_t)sliced_.size() - first;
      if (loading.layerwise || !rows || loading.fd < 0) continue;
      int64_t elements = 0;
      for (int m = 0; m < MODULES; ++m) elements += elements_of(loading.host, m);
      order_.clear();
      for (int32_t c = 0; c < a.channels; ++c)
        if (a.channel[c]->alive()) order_.push_back(c);
      std::stable_sort(order_.begin(), order_.end(), [this](int32_t b, int32_t c) { return load_[b] < load_[c]; });
      int64_t each_can = rows;
      if (a.layer_ns > 0 && elements) {
        const double can = (a.layer_ns / (double)elements - a.read_ns) / a.row_ns;
        each_can = (int64_t)std::min<double>((double)rows, std::max(can, 1.0));
      }
      const int64_t wanted = std::min<int64_t>((rows + each_can - 1) / each_can, order_.size());
      int64_t done = 0;
      for (int64_t k = 0; k < wanted; ++k) {
        const int32_t c = order_[k];
        Channel& channel = *a.channel[c];
        const int64_t n = std::min((rows - done + wanted - k - 1) / (wanted - k), channel.h.max_rows - used_[c]);
        if (n <= 0 || channel.h.step.count == MAX_SLICES) continue;
        slice(i, c, first + (int32_t)done, (int32_t)n);
        done += n, used_[c] += n, load_[c] += n * elements;
      }
    }
  }

  void slice(int64_t i, int32_t c, int32_t first, int32_t n) {
    const Loading& loading = assist_->loading[i];
    Slice mine{(int32_t)i, c, 0, first, n, (int32_t)used_[c], {}, false};
    for (int g = 0; g < GROUPS; ++g)
      for (int m = GROUP_START[g]; m < GROUP_START[g + 1]; ++m) mine.elements[g] += elements_of(loading.host, m);
    mine.number = assist_->channel[c]->add_slice(slice_of(loading, used_[c], n), loading.host.scales);
    slices_.push_back(mine);
  }

  // Decides for every row where it is computed in this layer.
  void place(int64_t layer) {
    bool changed = layer == 0;
    for (int64_t i = 0; i < assist_->count; ++i) {
      const Loading& loading = assist_->loading[i];
      const Place now = loaded(loading.slot) > layer ? DEVICE : HOST;
      if (now == at_[i]) continue;
      at_[i] = now;
      changed = true;
      point(loading, now);
    }
    for (Slice& slice : slices_) {
      const bool on = at_[slice.loading] == HOST && assist_->channel[slice.channel]->alive();
      changed |= on != slice.on;
      slice.on = on;
    }
    if (!changed) return;
    row_slot_.assign(step_->row_slot, step_->row_slot + step_->rows);
    for (int g = 0; g < GROUPS; ++g) rows_[g].clear(), requests_[g].clear();
    for (int32_t c = 0; c < assist_->channels; ++c)
      for (int g = 0; g < GROUPS; ++g) {
        Request request{c, 0, {}};
        for (const Slice& slice : slices_) {
          if (slice.channel != c || !slice.on) continue;
          for (int r = 0; r < slice.rows; ++r) {
            row_slot_[sliced_[slice.first + r]] = -1;
            if (slice.elements[g]) rows_[g].push_back({sliced_[slice.first + r], slice.at_row + r, c});
          }
          if (slice.elements[g]) request.slices |= 1u << slice.number;
          request.work.elements += slice.elements[g];
          request.work.row_elements += slice.rows * slice.elements[g];
        }
        if (request.slices) requests_[g].push_back(request);
      }
    lora_->build(pool_, row_slot_.data(), step_->rows, element_bytes_, team_);
    for (const Row& row : rows_[GATE_UP]) lora_->on_gate_up[row.row] = 1;
  }

  // The slot's page table: the pool's own, or host memory as lines from the pool's arena.
  void point(const Loading& loading, Place to) {
    const int64_t host = ((intptr_t)loading.host.arena - (intptr_t)pool_.arena) / (8 * element_bytes_);
    for (int m = 0; m < MODULES; ++m)
      for (int p = 0; p < loading.host.pages[m]; ++p) {
        const int64_t at = (loading.slot * MODULES + m) * pool_.max_pages + p;
        table_[at] = to == DEVICE ? device_table_[at] : host + loading.host.table[m * loading.host.max_pages + p];
      }
  }

  // Waits for a copy that is expected to stay ahead. A step waits no longer than its bound, summed over its layers.
  void wait_for(int32_t slot, int64_t layer) {
    int32_t have = loaded(slot);
    if (have > layer) return;
    const int64_t began = now_ns(), until = began + assist_->layer_wait_ns - waited_ns_;
    int64_t now = began;
    while ((have = loaded(slot)) <= layer && now < until) {
      if (now - began < SPIN_NS) {
        cpu_relax();
      } else {
        const timespec left{(until - now) / 1000000000, (until - now) % 1000000000};
        syscall(SYS_futex, pool_.loaded_layers + slot, FUTEX_WAIT_PRIVATE, have, &left, nullptr, 0);
      }
      now = now_ns();
    }
    waited_ns_ += now - began;
    assist_->layer_waited_ns += now - began;
    if (have <= layer) ++assist_->layers_late;
  }

  Assist* assist_ = nullptr;
  const Step* step_ = nullptr;
  LoraPlan* lora_ = nullptr;
  LoraPlan repair_;
  int64_t element_bytes_ = 0, waited_ns_ = 0;
  int team_ = 1;
  Pool pool_;
  const int64_t* device_table_ = nullptr;
  std::vector<int64_t> table_;
  std::vector<Place> at_;          // [loading]
  std::vector<int64_t> rows_of_;   // [loading]
  std::vector<Slice> slices_;
  std::vector<int32_t> sliced_;    // rows of the step, adapter after adapter
  std::vector<int32_t> order_, row_slot_;
  std::vector<int64_t> load_, used_;  // [channel]
  std::vector<Row> rows_[GROUPS];     // that processes compute in this layer, by channel
  std::vector<Request> requests_[GROUPS];
  std::atomic<int64_t> broken_{-1};
};

}  // namespace motet
