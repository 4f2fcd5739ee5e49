// Streams beside the current one, for work that is to run at the same time.
#pragma once

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>

#include <vector>

namespace h2o_prefill {

// Side streams begin with what the current stream has done so far, and join() lets that one wait
// for them; both can be captured into a CUDA graph. What is allocated on one of them must live
// until then.
class SideStreams {
 public:
  explicit SideStreams(int64_t count) : main_(c10::cuda::getCurrentCUDAStream()) {
    const Event begin(count > 0);
    if (count > 0) C10_CUDA_CHECK(cudaEventRecord(begin.event, main_));
    for (int64_t i = 0; i < count; ++i) {
      side_.push_back(c10::cuda::getStreamFromPool());
      C10_CUDA_CHECK(cudaStreamWaitEvent(side_.back(), begin.event, 0));
    }
  }

  // Makes stream i current: 0 is the one that was, the side streams follow.
  c10::cuda::CUDAStreamGuard use(int64_t i) const {
    return c10::cuda::CUDAStreamGuard(i == 0 ? main_ : side_[i - 1]);
  }

  void join() const {
    for (const auto& stream : side_) {
      const Event end(true);
      C10_CUDA_CHECK(cudaEventRecord(end.event, stream));
      C10_CUDA_CHECK(cudaStreamWaitEvent(main_, end.event, 0));
    }
  }

 private:
  struct Event {
    cudaEvent_t event = nullptr;

    explicit Event(bool wanted) {
      if (wanted) C10_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    }
    Event(const Event&) = delete;
    Event& operator=(const Event&) = delete;
    ~Event() {
      if (event) cudaEventDestroy(event);
    }
  };

  c10::cuda::CUDAStream main_;
  std::vector<c10::cuda::CUDAStream> side_;
};

}  // namespace h2o_prefill
