// A GPU for tests: the host's memory under another name, the CPU's kernels, and collectives that
// behave as NCCL's do. README.md beside this file says what is like a real one and what is not.
#include <torch/extension.h>

#include <ATen/EmptyTensor.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <map>
#include <mutex>
#include <thread>

namespace {
constexpr auto kType = c10::DeviceType::PrivateUse1;
constexpr int kMost = 16;

const char* variable(const char* name, const char* otherwise) {
  const char* value = std::getenv(name);
  return value ? value : otherwise;
}
std::vector<std::string> visible() {  // as CUDA_VISIBLE_DEVICES: the identities of what is seen
  std::vector<std::string> found;
  int all = std::atoi(variable("FAKEGPU_COUNT", "2"));
  std::string list = variable("FAKEGPU_VISIBLE_DEVICES", "*");
  if (list == "*") {
    for (int i = 0; i < all; i++) found.push_back("FAKE-" + std::to_string(i));
    return found;
  }
  std::stringstream words(list);
  for (std::string word; std::getline(words, word, ',');) found.push_back(word);
  return found;
}
const std::vector<std::string>& seen() {  // for the life of the process, from its first use on
  static const std::vector<std::string> all = visible();
  return all;
}
std::atomic<bool> initialised{false};
void initialise() { if (!initialised.exchange(true)) seen(); }
int count() { return static_cast<int>((initialised ? seen() : visible()).size()); }
double now_s() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

thread_local int current = 0;
std::atomic<int64_t> used[kMost];
std::atomic<int64_t> peak[kMost];
std::atomic<bool> contexts[kMost];
std::atomic<bool> hung{false};
std::atomic<int> broken{0};

// -- what a stream waits for -----------------------------------------------------------------------

// Something that goes on beside the host. Kernels run at once, so a device's stream is no more than
// the collectives for which its next kernel has to wait.
struct Pending {
  std::mutex lock;
  std::condition_variable passed;
  bool done = false;
  double at_s = 0;
  void finish() {
    std::lock_guard<std::mutex> held(lock);
    if (done) return;
    done = true;
    at_s = now_s();
    passed.notify_all();
  }
  bool is_done() { std::lock_guard<std::mutex> held(lock); return done; }
  void wait() {
    std::unique_lock<std::mutex> held(lock);
    passed.wait(held, [this] { return done; });
  }
};
using Stream = std::vector<std::shared_ptr<Pending>>;
std::mutex streams_lock;
Stream streams[kMost];

Stream snapshot(int device) {
  std::lock_guard<std::mutex> held(streams_lock);
  Stream left;
  for (auto& one : streams[device]) if (!one->is_done()) left.push_back(one);
  streams[device] = left;
  return left;
}
void wait_for(int device, const std::shared_ptr<Pending>& what) {
  std::lock_guard<std::mutex> held(streams_lock);
  streams[device].push_back(what);
}
void check() {
  if (broken) throw c10::AcceleratorError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, broken, "CUDA error: device-side assert triggered (a fake one)");
}
// The host waits for the device: in C, where no signal of Python's is handled, as CUDA's calls do.
void drain(int device) {
  initialise();
  contexts[device] = true;
  auto left = snapshot(device);
  if (!left.empty() || hung) {
    std::unique_ptr<pybind11::gil_scoped_release> free;
    if (Py_IsInitialized() && PyGILState_Check()) free = std::make_unique<pybind11::gil_scoped_release>();
    while (hung) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    for (auto& one : left) one->wait();
  }
  check();
}

struct Mark {  // an event: what had to be done when it was recorded
  Stream before;
  double at_s;
  bool is_done() {
    for (auto& one : before) if (!one->is_done()) return false;
    return !hung;
  }
  double time() {
    double last = at_s;
    for (auto& one : before) last = std::max(last, one->at_s);
    return last;
  }
};
thread_local std::shared_ptr<Pending> recording;  // a collective's own stream, while it is marked

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kType; }
  c10::Device exchangeDevice(c10::Device d) const override { auto old = current; current = d.index(); return {kType, static_cast<c10::DeviceIndex>(old)}; }
  c10::Device getDevice() const override { return {kType, static_cast<c10::DeviceIndex>(current)}; }
  void setDevice(c10::Device d) const override { current = d.index(); }
  void uncheckedSetDevice(c10::Device d) const noexcept override { current = d.index(); }
  c10::Stream getStream(c10::Device d) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, d); }
  c10::Stream getDefaultStream(c10::Device d) const override { return c10::Stream(c10::Stream::DEFAULT, d); }
  c10::Stream getNewStream(c10::Device d, int) const override { return c10::Stream(c10::Stream::UNSAFE, d, ++made_); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return c10::Stream(c10::Stream::UNSAFE, d, ++made_); }
  c10::Stream exchangeStream(c10::Stream s) const noexcept override { return c10::Stream(c10::Stream::DEFAULT, s.device()); }
  c10::DeviceIndex deviceCount() const noexcept override { return static_cast<c10::DeviceIndex>(count()); }
  void record(void** event, const c10::Stream& s, const c10::DeviceIndex, const c10::EventFlag) const override {
    check();
    delete static_cast<Mark*>(*event);
    auto index = s.device_index();
    contexts[index] = true;
    *event = new Mark{recording ? Stream{recording} : snapshot(index), now_s()};
  }
  void block(void* event, const c10::Stream& s) const override {
    if (event) for (auto& one : static_cast<Mark*>(event)->before) wait_for(s.device_index(), one);
  }
  bool queryEvent(void* event) const override {
    contexts[current] = true;  // of the thread's device: as CUDA's call does
    check();
    return !event || static_cast<Mark*>(event)->is_done();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Mark*>(event); }
  bool queryStream(const c10::Stream& s) const override { check(); return snapshot(s.device_index()).empty() && !hung; }
  void synchronizeStream(const c10::Stream& s) const override { drain(s.device_index()); }
  void synchronizeEvent(void* event) const override {
    std::unique_ptr<pybind11::gil_scoped_release> free;
    if (Py_IsInitialized() && PyGILState_Check()) free = std::make_unique<pybind11::gil_scoped_release>();
    while (hung) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    if (event) for (auto& one : static_cast<Mark*>(event)->before) one->wait();
    check();
  }
  void synchronizeDevice(const c10::DeviceIndex i) const override { drain(i); }
  double elapsedTime(void* a, void* b, const c10::DeviceIndex) const override {
    return (static_cast<Mark*>(b)->time() - static_cast<Mark*>(a)->time()) * 1e3;
  }
  static inline std::atomic<int> made_{0};
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

// -- memory ----------------------------------------------------------------------------------------

struct Block { int device; size_t bytes; void* memory; };

struct Allocator final : c10::Allocator {
  static void release(void* context) {
    auto* block = static_cast<Block*>(context);
    used[block->device] -= static_cast<int64_t>(block->bytes);
    std::free(block->memory);
    delete block;
  }
  static int64_t capacity() { return std::atoll(variable("FAKEGPU_MEMORY", "8589934592")); }
  c10::DataPtr allocate(size_t n) override {
    TORCH_CHECK(current >= 0 && current < count(), "CUDA error: invalid device ordinal (a fake one)");
    initialise();
    contexts[current] = true;
    auto device = c10::Device(kType, static_cast<c10::DeviceIndex>(current));
    if (!n) return {nullptr, nullptr, &release, device};
    if (used[current] + static_cast<int64_t>(n) > capacity()) {
      TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory (a fake one). Tried to allocate ", n, " bytes on fakegpu:", current);
    }
    void* memory = nullptr;
    TORCH_CHECK(posix_memalign(&memory, 64, n) == 0, "the host is out of memory");
    auto total = used[current] += static_cast<int64_t>(n);
    if (total > peak[current]) peak[current] = total;
    return {memory, new Block{current, n, memory}, &release, device};
  }
  c10::DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, std::size_t n) const override { std::memcpy(to, from, n); }
};
Allocator allocator;
REGISTER_ALLOCATOR(kType, &allocator);

// What copies go on beside: the host's memory too, but known.
struct Pinned final : c10::Allocator {
  static inline std::mutex lock;
  static inline std::map<const char*, size_t> blocks;
  static void release(void* memory) {
    std::lock_guard<std::mutex> held(lock);
    blocks.erase(static_cast<const char*>(memory));
    std::free(memory);
  }
  c10::DataPtr allocate(size_t n) override {
    void* memory = nullptr;
    TORCH_CHECK(posix_memalign(&memory, 64, std::max<size_t>(n, 1)) == 0, "the host is out of memory");
    std::lock_guard<std::mutex> held(lock);
    blocks[static_cast<const char*>(memory)] = n;
    return {memory, memory, &release, c10::Device(c10::kCPU)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, std::size_t n) const override { std::memcpy(to, from, n); }
  static bool has(const void* pointer) {
    std::lock_guard<std::mutex> held(lock);
    auto after = blocks.upper_bound(static_cast<const char*>(pointer));
    if (after == blocks.begin()) return false;
    auto found = std::prev(after);
    return static_cast<const char*>(pointer) < found->first + std::max<size_t>(found->second, 1);
  }
};
Pinned pinned;

struct OnDevice {  // computes on a device within
  int was = current;
  explicit OnDevice(std::optional<at::Device> device) { if (device && device->has_index()) current = device->index(); }
  ~OnDevice() { current = was; }
};

struct Generator : at::CPUGeneratorImpl {
  explicit Generator(c10::DeviceIndex i) {
    device_ = c10::Device(kType, i);
    key_set_ = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
  }
};
std::vector<at::Generator>& generators() {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (int i = 0; i < kMost; i++) made.push_back(at::make_generator<Generator>(static_cast<c10::DeviceIndex>(i)));
    return made;
  }();
  return all;
}
struct Hooks : at::PrivateUse1HooksInterface {
  bool hasPrimaryContext(c10::DeviceIndex i) const override { return contexts[i]; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return count() > 0; }
  c10::DeviceIndex deviceCount() const override { return static_cast<c10::DeviceIndex>(count()); }
  c10::DeviceIndex getCurrentDevice() const override { return static_cast<c10::DeviceIndex>(current); }
  void setCurrentDevice(c10::DeviceIndex d) const override { current = d; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex d) const override { auto old = current; current = d; return static_cast<c10::DeviceIndex>(old); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex d) const override { return exchangeDevice(d); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex i) const override { return generators()[i < 0 ? current : i]; }
  at::Generator getNewGenerator(c10::DeviceIndex i) const override { return at::make_generator<Generator>(i < 0 ? static_cast<c10::DeviceIndex>(current) : i); }
  at::Device getDeviceFromPtr(void*) const override { return {kType, static_cast<c10::DeviceIndex>(current)}; }
  bool isPinnedPtr(const void* pointer) const override { return Pinned::has(pointer); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &pinned; }
  void resizePrivateUse1Bytes(const c10::Storage& s, size_t n) const override {
    OnDevice there(s.device());
    drain(s.device().index());  // what is freed is free for what comes later on the stream only
    auto fresh = allocator.allocate(n);
    if (n && s.nbytes()) std::memcpy(fresh.get(), s.data(), std::min(n, s.nbytes()));
    s.unsafeGetStorageImpl()->set_data_ptr_noswap(std::move(fresh));
    s.unsafeGetStorageImpl()->set_nbytes(n);
  }
};

// -- kernels: the CPU's, on the same memory --------------------------------------------------------

at::Tensor same_on_cpu(const at::Tensor& t) {
  if (!t.defined() || !t.device().is_privateuseone()) return t;
  return at::from_blob(t.data_ptr(), t.sizes(), t.strides(), [t](void*) {}, t.options().device(at::kCPU).requires_grad(false));
}
std::optional<at::Tensor> same_on_cpu(const std::optional<at::Tensor>& t) {
  return t && t->defined() ? std::optional<at::Tensor>(same_on_cpu(*t)) : std::nullopt;
}
at::Tensor back(const at::Tensor& t, at::Device device) { return t.defined() ? t.to(device) : t; }

at::Tensor empty(c10::IntArrayRef size, std::optional<at::ScalarType> type, std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  OnDevice there(device);
  return at::detail::empty_generic(size, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(type), format);
}
at::Tensor empty_strided(c10::IntArrayRef size, c10::IntArrayRef stride, std::optional<at::ScalarType> type, std::optional<at::Layout>, std::optional<at::Device> device, std::optional<bool>) {
  OnDevice there(device);
  return at::detail::empty_strided_generic(size, stride, &allocator, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(type));
}
at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  for (auto& one : {from, to}) if (one.device().is_privateuseone()) drain(one.device().index());
  same_on_cpu(to).copy_(same_on_cpu(from));
  return to;
}
at::Tensor copy_and_resize(const at::Tensor& from, const at::Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}
c10::Scalar item(const at::Tensor& t) {
  drain(t.device().index());
  return same_on_cpu(t).item();
}
at::Tensor& set_storage(at::Tensor& t, at::Storage s, int64_t offset, c10::IntArrayRef size, c10::IntArrayRef stride) {
  return at::native::set_storage_cpu_(t, std::move(s), offset, size, stride);
}
at::Tensor convolution(const at::Tensor& input, const at::Tensor& weight, const std::optional<at::Tensor>& bias, c10::IntArrayRef stride, c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef out, int64_t groups) {
  drain(input.device().index());
  return back(at::convolution(same_on_cpu(input), same_on_cpu(weight), same_on_cpu(bias), stride, padding, dilation, transposed, out, groups), input.device());
}
std::tuple<at::Tensor, at::Tensor, at::Tensor> convolution_backward(const at::Tensor& grad, const at::Tensor& input, const at::Tensor& weight, c10::IntArrayRef stride, c10::IntArrayRef padding, c10::IntArrayRef dilation, bool transposed, c10::IntArrayRef out, int64_t groups, std::array<bool, 3> mask) {
  drain(input.device().index());
  auto [a, b, c] = at::convolution_backward(same_on_cpu(grad), same_on_cpu(input), same_on_cpu(weight), std::vector<int64_t>{weight.size(transposed ? 1 : 0) * (transposed ? groups : 1)}, stride, padding, dilation, transposed, out, groups, mask);
  return {back(a, input.device()), back(b, input.device()), back(c, input.device())};
}
// Its schema does not say that it changes the running statistics.
std::tuple<at::Tensor, at::Tensor, at::Tensor> batch_norm(const at::Tensor& input, const std::optional<at::Tensor>& weight, const std::optional<at::Tensor>& bias, const std::optional<at::Tensor>& mean, const std::optional<at::Tensor>& variance, bool training, double momentum, double eps) {
  drain(input.device().index());
  auto [a, b, c] = at::native_batch_norm(same_on_cpu(input), same_on_cpu(weight), same_on_cpu(bias), same_on_cpu(mean), same_on_cpu(variance), training, momentum, eps);
  return {back(a, input.device()), back(b, input.device()), back(c, input.device())};
}
void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  drain(current);
  at::native::cpu_fallback(op, stack);
}

// -- collectives -----------------------------------------------------------------------------------

using Inner = c10::intrusive_ptr<c10d::Backend>;
using InnerWork = c10::intrusive_ptr<c10d::Work>;

// One operation, in two halves so that those of a group can all begin before the first is awaited.
struct Operation {
  std::function<InnerWork()> begin;
  std::function<void()> end;
  std::function<void()> spoil;
};

class Work : public c10d::Work {
 public:
  Work(int rank, std::shared_ptr<Pending> pending, std::vector<at::Tensor> outputs, int device)
      : c10d::Work(rank, c10d::OpType::UNKNOWN), pending_(std::move(pending)), outputs_(std::move(outputs)), device_(device) {
    future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()), std::vector<c10::Device>{c10::Device(kType, static_cast<c10::DeviceIndex>(device))});
    recording = pending_;  // whoever waits for the future waits for the collective's stream
    future_->markCompleted(c10::IValue(outputs_));
    recording = nullptr;
  }
  bool isCompleted() override { return pending_->is_done(); }
  bool isSuccess() const override { return true; }
  bool wait(std::chrono::milliseconds) override {  // the stream waits, not the host
    wait_for(device_, pending_);
    return true;
  }
  void synchronize() override { wait_for(device_, pending_); }
  void blockCurrentStream() override { wait_for(device_, pending_); }
  std::vector<at::Tensor> result() override { return outputs_; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

 private:
  std::shared_ptr<Pending> pending_;
  std::vector<at::Tensor> outputs_;
  int device_;
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// What happens on one communicator happens in the order in which it was asked for.
struct Communicator {
  struct Item { std::vector<Operation> operations; Stream before; std::shared_ptr<Pending> pending; };
  std::mutex lock;
  std::condition_variable changed;
  std::deque<Item> items;
  std::shared_ptr<Pending> running;
  bool aborted = false, closed = false;

  void add(Item item) {
    std::lock_guard<std::mutex> held(lock);
    if (aborted) { item.pending->finish(); return; }
    items.push_back(std::move(item));
    changed.notify_all();
  }
  bool is_aborted() { std::lock_guard<std::mutex> held(lock); return aborted; }
  void abort() {
    std::lock_guard<std::mutex> held(lock);
    aborted = true;
    changed.notify_all();
  }
  void close() {
    std::lock_guard<std::mutex> held(lock);
    closed = true;
    changed.notify_all();
  }
  void loop() {
    for (;;) {
      Item item;
      {
        std::unique_lock<std::mutex> held(lock);
        changed.wait(held, [this] { return aborted || closed || !items.empty(); });
        if (aborted) { for (auto& one : items) { spoil(one); one.pending->finish(); } items.clear(); return; }
        if (items.empty()) return;
        item = std::move(items.front());
        items.pop_front();
      }
      run(item);
    }
  }
  // Runs beside the loop, which must be able to let go of it: the inner operation may never end.
  void run(Item& item) {
    auto operations = std::make_shared<std::vector<Operation>>(item.operations);
    auto over = std::make_shared<Pending>();
    auto failed = std::make_shared<std::atomic<bool>>(false);
    auto before = item.before;
    std::thread([operations, over, failed, before] {
      try {
        for (auto& one : before) one->wait();
        std::vector<InnerWork> works;
        for (auto& one : *operations) works.push_back(one.begin());
        for (auto& work : works) if (work) work->wait();
      } catch (const std::exception& error) {
        if (std::getenv("FAKEGPU_DEBUG")) std::cerr << "fakenccl: " << error.what() << std::endl;
        *failed = true;  // a peer is gone: NCCL's kernel would go on waiting for it
        return;
      }
      over->finish();
    }).detach();
    while (!over->is_done()) {
      std::unique_lock<std::mutex> held(lock);
      changed.wait_for(held, std::chrono::microseconds(200), [this] { return aborted; });
      if (aborted) { held.unlock(); spoil(item); item.pending->finish(); return; }
    }
    for (auto& one : item.operations) one.end();
    item.pending->finish();
  }
  static void spoil(Item& item) { for (auto& one : item.operations) if (one.spoil) one.spoil(); }
};

class FakeNccl : public c10d::Backend {
 public:
  FakeNccl(c10::intrusive_ptr<c10d::Store> store, int rank, int size, Inner inner)
      : c10d::Backend(rank, size), store_(std::move(store)), inner_(std::move(inner)) {}
  const std::string getBackendName() const override { return "fakenccl"; }
  bool supportsCoalescing() const override { return true; }
  void setTimeout(std::chrono::milliseconds) override {}
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return collectives_; }  // as NCCL, without send and recv

  void startCoalescing() override { coalescing_ = true; grouped_.clear(); outputs_.clear(); }
  c10::intrusive_ptr<c10d::Work> endCoalescing() override {
    coalescing_ = false;
    auto operations = std::move(grouped_);
    grouped_.clear();
    return submit("collectives", std::move(operations), std::move(outputs_));
  }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& given) override {
    auto options = given;
    double share = averaged(options.reduceOp);
    auto held = own(tensors);
    return add("collectives", tensors, {[=, this]() mutable { load(*held, tensors); return inner_->allreduce(*held, options); },
      [=] { for (size_t i = 0; i < held->size(); i++) same_on_cpu(tensors[i]).copy_(share == 1 ? (*held)[i] : (*held)[i] * share); }, garbage(tensors)});
  }
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(std::vector<at::Tensor>& tensors, const c10d::AllreduceCoalescedOptions& given) override {
    startCoalescing();
    c10d::AllreduceOptions options;
    options.reduceOp = given.reduceOp;
    for (auto& one : tensors) { std::vector<at::Tensor> alone{one}; allreduce(alone, options); }
    return endCoalescing();
  }
  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors, const c10d::BroadcastOptions& options) override {
    auto held = own(tensors);
    return add("collectives", tensors, {[=, this]() mutable { load(*held, tensors); return inner_->broadcast(*held, options); },
      [=] { for (size_t i = 0; i < held->size(); i++) same_on_cpu(tensors[i]).copy_((*held)[i]); }, garbage(tensors)});
  }
  c10::intrusive_ptr<c10d::Work> reduce(std::vector<at::Tensor>& tensors, const c10d::ReduceOptions& given) override {
    auto options = given;
    double share = averaged(options.reduceOp);
    auto held = own(tensors);
    bool mine = options.rootRank == getRank();
    return add("collectives", tensors, {[=, this]() mutable { load(*held, tensors); return inner_->reduce(*held, options); },
      [=] { if (mine) same_on_cpu(tensors[0]).copy_(share == 1 ? (*held)[0] : (*held)[0] * share); }, garbage(tensors)});
  }
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs, const c10d::AllgatherOptions& options) override {
    auto in = own(inputs);
    auto out = std::make_shared<std::vector<std::vector<at::Tensor>>>();
    for (auto& row : outputs) out->push_back(*own(row));
    auto flat = outputs[0];
    return add("collectives", flat, {[=, this]() mutable { load(*in, inputs); return inner_->allgather(*out, *in, options); },
      [=] { for (size_t i = 0; i < flat.size(); i++) same_on_cpu(flat[i]).copy_((*out)[0][i]); }, garbage(flat)}, inputs);
  }
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options) override {
    auto in = own({input}), out = own({output});
    auto o = output, i = input;
    return add("collectives", {output}, {[=, this]() mutable { load(*in, {i}); return inner_->_allgather_base((*out)[0], (*in)[0], options); },
      [=] { same_on_cpu(o).copy_((*out)[0]); }, garbage({output})}, {input});
  }
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs, const c10d::AllgatherOptions& options) override {
    startCoalescing();
    for (size_t i = 0; i < inputs.size(); i++) _allgather_base(outputs[i], inputs[i], options);
    return endCoalescing();
  }
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input, const c10d::ReduceScatterOptions& given) override {
    c10d::AllreduceOptions options;
    options.reduceOp = given.reduceOp;
    double share = averaged(options.reduceOp);
    auto in = own({input});
    auto o = output, i = input;
    int rank = getRank();
    return add("collectives", {output}, {[=, this]() mutable { load(*in, {i}); return inner_->allreduce(*in, options); },
      [=] { auto part = (*in)[0].reshape(-1).narrow(0, rank * o.numel(), o.numel()).reshape(o.sizes()); same_on_cpu(o).copy_(share == 1 ? part : part * share); }, garbage({output})}, {input});
  }
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs, const c10d::ReduceScatterOptions& options) override {
    startCoalescing();
    for (size_t i = 0; i < inputs.size(); i++) _reduce_scatter_base(outputs[i], inputs[i], options);
    return endCoalescing();
  }
  c10::intrusive_ptr<c10d::Work> reduce_scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs, const c10d::ReduceScatterOptions& given) override {
    c10d::AllreduceOptions options;
    options.reduceOp = given.reduceOp;
    double share = averaged(options.reduceOp);
    auto all = inputs[0];
    auto in = own({at::cat(all)});
    auto o = outputs[0];
    int rank = getRank();
    return add("collectives", outputs, {[=, this]() mutable { return inner_->allreduce(*in, options); },
      [=] { auto part = (*in)[0].chunk(getSize())[rank]; same_on_cpu(o).copy_(share == 1 ? part : part * share); }, garbage(outputs)}, all);
  }
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& out_sizes, std::vector<int64_t>& in_sizes, const c10d::AllToAllOptions& options) override {
    auto in = own({input}), out = own({output});
    auto o = output, i = input;
    auto a = out_sizes, b = in_sizes;
    return add("collectives", {output}, {[=, this]() mutable { load(*in, {i}); return inner_->alltoall_base((*out)[0], (*in)[0], a, b, options); },
      [=] { same_on_cpu(o).copy_((*out)[0]); }, garbage({output})}, {input});
  }
  c10::intrusive_ptr<c10d::Work> gather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs, const c10d::GatherOptions& options) override {
    auto in = own(inputs);
    auto out = std::make_shared<std::vector<std::vector<at::Tensor>>>();
    for (auto& row : outputs) out->push_back(*own(row));
    auto flat = outputs.empty() ? std::vector<at::Tensor>{} : outputs[0];
    return add("collectives", flat, {[=, this]() mutable { load(*in, inputs); return inner_->gather(*out, *in, options); },
      [=] { for (size_t i = 0; i < flat.size(); i++) same_on_cpu(flat[i]).copy_((*out)[0][i]); }, garbage(flat)}, inputs);
  }
  c10::intrusive_ptr<c10d::Work> scatter(std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs, const c10d::ScatterOptions& options) override {
    auto out = own(outputs);
    auto in = std::make_shared<std::vector<std::vector<at::Tensor>>>();
    for (auto& row : inputs) { in->push_back(*own(row)); load(in->back(), row); }
    auto targets = outputs;
    return add("collectives", outputs, {[=, this]() mutable { return inner_->scatter(*out, *in, options); },
      [=] { same_on_cpu(targets[0]).copy_((*out)[0]); }, garbage(outputs)});
  }
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& given) override {
    auto token = at::zeros({1}, at::TensorOptions().device(c10::Device(kType, static_cast<c10::DeviceIndex>(current))));
    std::vector<at::Tensor> tensors{token};
    auto work = allreduce(tensors, c10d::AllreduceOptions());
    auto device = token.device().index();
    work->wait();
    drain(device);  // NCCL's barrier does block the host
    return work;
  }
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int to, int tag) override {
    auto held = own(tensors);
    return add(pair(to), tensors, {[=, this]() mutable { load(*held, tensors); return inner_->send(*held, to, tag); }, [] {}, nullptr});
  }
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int from, int tag) override {
    auto held = own(tensors);
    return add(pair(from), tensors, {[=, this]() mutable { return inner_->recv(*held, from, tag); },
      [=] { for (size_t i = 0; i < held->size(); i++) same_on_cpu(tensors[i]).copy_((*held)[i]); }, garbage(tensors)});
  }
  void abort() override {
    std::lock_guard<std::mutex> held(lock_);
    aborted_ = true;
    for (auto& [name, one] : communicators_) one->abort();
  }
  // As ncclCommFinalize: every rank has to come, so it hangs where one has died.
  void shutdown() override {
    if (aborted_ || !met_) return;
    store_->set("gone/" + std::to_string(getRank()), std::vector<uint8_t>{1});
    std::vector<std::string> all;
    for (int rank = 0; rank < getSize(); rank++) all.push_back("gone/" + std::to_string(rank));
    while (!aborted_ && !store_->check(all)) std::this_thread::sleep_for(std::chrono::milliseconds(2));
    std::lock_guard<std::mutex> held(lock_);
    for (auto& [name, one] : communicators_) one->close();
  }

 private:
  static std::shared_ptr<std::vector<at::Tensor>> own(const std::vector<at::Tensor>& tensors) {
    auto made = std::make_shared<std::vector<at::Tensor>>();
    for (auto& one : tensors) made->push_back(at::empty(one.sizes(), one.options().device(at::kCPU).requires_grad(false)));
    return made;
  }
  static void load(std::vector<at::Tensor>& own, const std::vector<at::Tensor>& from) {
    for (size_t i = 0; i < own.size(); i++) own[i].copy_(same_on_cpu(from[i]));
  }
  // An aborted kernel leaves a part of the sum behind, and says nothing.
  static std::function<void()> garbage(std::vector<at::Tensor> tensors) {
    return [tensors] { for (auto& one : tensors) if (one.is_floating_point() && one.numel()) same_on_cpu(one).reshape(-1)[0].fill_(1e30); };
  }
  double averaged(c10d::ReduceOp& op) {
    if (op != c10d::ReduceOp::AVG) return 1;
    op = c10d::ReduceOp::SUM;
    return 1.0 / getSize();
  }
  std::string pair(int other) {
    if (coalescing_) return "collectives";
    return std::to_string(std::min(other, getRank())) + ":" + std::to_string(std::max(other, getRank()));
  }
  c10::intrusive_ptr<c10d::Work> add(const std::string& where, const std::vector<at::Tensor>& outputs, Operation operation, const std::vector<at::Tensor>& inputs = {}) {
    for (auto* list : {&outputs, &inputs})
      for (auto& one : *list) TORCH_CHECK(one.device().is_privateuseone(), "fakenccl: tensors must be on the GPU, this one is on ", one.device());
    if (coalescing_) {
      grouped_.push_back(std::move(operation));
      outputs_.insert(outputs_.end(), outputs.begin(), outputs.end());
      return nullptr;
    }
    return submit(where, {std::move(operation)}, outputs);
  }
  c10::intrusive_ptr<c10d::Work> submit(const std::string& where, std::vector<Operation> operations, std::vector<at::Tensor> outputs) {
    check();
    int device = outputs.empty() ? current : outputs[0].device().index();
    if (where == "collectives") { meet(device); collectives_++; }
    auto pending = std::make_shared<Pending>();
    Communicator::Item item{std::move(operations), snapshot(device), pending};
    communicator(where)->add(std::move(item));
    return c10::make_intrusive<Work>(getRank(), pending, std::move(outputs), device);
  }
  std::shared_ptr<Communicator> communicator(const std::string& name) {
    std::lock_guard<std::mutex> held(lock_);
    auto& found = communicators_[name];
    if (!found) {
      found = std::make_shared<Communicator>();
      if (aborted_) found->abort();
      std::thread([one = found] { one->loop(); }).detach();
    }
    return found;
  }
  // The communicator is made with the first collective; all ranks say which GPU they have.
  void meet(int device) {
    if (met_) return;
    met_ = true;
    std::string own = seen().at(device);
    store_->set("gpu/" + std::to_string(getRank()), std::vector<uint8_t>(own.begin(), own.end()));
    for (int other = 0; other < getSize(); other++) {
      auto theirs = store_->get("gpu/" + std::to_string(other));
      TORCH_CHECK_WITH(DistBackendError, other == getRank() || std::string(theirs.begin(), theirs.end()) != own,
        "NCCL error: invalid usage. Duplicate GPU detected : rank ", getRank(), " and rank ", other, " both on ", own, " (a fake one)");
    }
  }

  c10::intrusive_ptr<c10d::Store> store_;
  Inner inner_;
  std::mutex lock_;
  std::map<std::string, std::shared_ptr<Communicator>> communicators_;
  std::atomic<bool> aborted_{false};
  uint64_t collectives_ = 0;
  bool met_ = false, coalescing_ = false;
  std::vector<Operation> grouped_;
  std::vector<at::Tensor> outputs_;
};
c10::intrusive_ptr<c10d::Backend> make_nccl(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size, const Inner& inner) {
  return c10::make_intrusive<FakeNccl>(store, rank, size, inner);
}
}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }
TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &empty);
  m.impl("empty_strided", &empty_strided);
  m.impl("_copy_from", &copy_from);
  m.impl("_copy_from_and_resize", &copy_and_resize);
  m.impl("_local_scalar_dense", &item);
  m.impl("view", &at::native::view);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("resize_", &at::native::resize_);
  m.impl("unfold", &at::native::unfold);
  m.impl("set_.source_Tensor", &at::native::set_tensor_);
  m.impl("set_.source_Storage", static_cast<at::Tensor& (*)(at::Tensor&, at::Storage)>(&at::native::set_));
  m.impl("set_.source_Storage_storage_offset", &set_storage);
  m.impl("native_batch_norm", &batch_norm);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolution_backward);
}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  m.def("set_device", [](int i) { TORCH_CHECK(i >= 0 && i < count(), "CUDA error: invalid device ordinal (a fake one)"); current = i; initialise(); contexts[i] = true; });
  m.def("exchange_device", [](int i) { int was = current; current = i; return was; });
  m.def("current_device", [] { return current; });
  m.def("device_count", &count);
  m.def("identity", [](int i) { initialise(); return seen().at(i); });
  m.def("is_initialized", [] { return initialised.load(); });
  m.def("has_context", [](int i) { return contexts[i].load(); });
  m.def("synchronize", [](int i) { drain(i); });
  m.def("memory", [](int i) { return std::make_tuple(Allocator::capacity() - used[i].load(), Allocator::capacity()); });
  m.def("peak", [](int i) { return peak[i].load(); });
  m.def("reset_peak", [](int i) { peak[i] = used[i].load(); });
  m.def("rng_state", [](int i) { std::lock_guard<std::mutex> held(generators()[i].mutex()); return generators()[i].get_state(); });
  m.def("set_rng_state", [](const at::Tensor& state, int i) { std::lock_guard<std::mutex> held(generators()[i].mutex()); generators()[i].set_state(state); });
  m.def("seed", [](int i, uint64_t seed) { std::lock_guard<std::mutex> held(generators()[i].mutex()); generators()[i].set_current_seed(seed); });
  m.def("fail", [](int code) { broken = code; });
  m.def("hang", [](bool on) { hung = on; });
  m.def("make_nccl", &make_nccl);
}
